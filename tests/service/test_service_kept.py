"""An answer says whether the files are kept, however the program ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from service_place import Place

from paracle_sandbox.service.users.kept_files import Listed


@pytest.mark.parametrize("is_broken", [False, True])
async def test_files_of_a_program_that_was_stopped(place: Place, is_broken: bool) -> None:
    if is_broken:
        place.break_disk()
    late = await place.shell("echo new > new; sleep 30", timeout=1)
    assert (late["kind"], late["files_kept"]) == ("timeout", not is_broken)


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize(("command", "last"), [("true", "result"), ("sleep 30", "error")])
async def test_files_of_a_program_that_was_followed(
    place: Place, is_broken: bool, command: str, last: str
) -> None:
    if is_broken:
        place.break_disk()
    body = {"command": f"echo new > new; {command}", "timeout": 1}
    answer = await place.client.post("/sandbox/ann/stream", json=body)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    event: dict[str, Any] = json.loads(lines[-1][6:])
    assert (event["event"], event["files_kept"]) == (last, not is_broken)


async def test_files_of_a_program_whose_sandbox_was_lost(place: Place) -> None:
    running = asyncio.create_task(place.shell("echo new > new; sleep 30"))
    inside = Path(place.backend.directory_of(place.service.sandboxes.sandbox_id("ann")))
    while not (inside / "new").exists():
        await asyncio.sleep(0.01)
    await place.lose()
    answer = await running
    assert (answer["kind"], answer["files_kept"]) == ("sandbox_lost", False)


async def test_files_beside_an_installation(place: Place) -> None:
    home = place.service.sandboxes.find("ann")
    assert home is not None
    await home.sandbox.write_file("new", "not kept by anybody yet")
    place.break_disk()
    body = {"package": "no-such-package", "timeout": 30}
    answer = (await place.client.post("/sandbox/ann/pip/install", json=body)).json()
    assert (answer["success"], answer["files_kept"]) == (False, False)


async def test_files_of_a_program_that_was_saved_after_a_later_one(place: Place) -> None:
    """Its listing is the older one: what came after must not be taken for removed."""
    home = place.service.sandboxes.find("ann")
    assert home is not None
    saves = home.workspace.saves
    async with await home.sandbox.start_command("true", then_listed=True) as command:
        await command.wait()
        await home.sandbox.write_file("later", "by somebody else")
        await place.service.sandboxes.keep(home)
        assert await place.service.sandboxes.save(home, Listed(command, saves))
    assert (home.workspace.directory / "later").read_text() == "by somebody else"
    assert home.sandbox.in_use == 0
