"""Whoever lost processes and /tmp is told: once at least, by an answer that arrives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from service_place import HEADER, Place
from service_process import ServiceProcess
from websockets.sync.client import connect

from paracle_sandbox.errors import SandboxCreationError


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("GET", "file?path=kept", {}),
        ("GET", "file?path=missing", {}),
        ("POST", "file", {"json": {"path": "new", "content": "x"}}),
        ("GET", "files", {}),
        ("GET", "files/raw?path=kept", {}),
        ("POST", "commands", {"json": {"command": "true"}}),
        ("POST", "stream", {"json": {"command": "true"}}),
        ("POST", "create", {}),
        ("POST", "pip/install", {"json": {"package": "no-such-package"}}),
        ("POST", "shell", {"json": {"command": "sleep 9", "timeout": 1}}),
        ("POST", "shell", {"json": {"command": "true"}, "headers": {"Idempotency-Key": "k"}}),
    ],
)
async def test_every_first_answer_tells(
    place: Place, method: str, path: str, fields: dict[str, Any]
) -> None:
    await place.lose()
    first = await place.client.request(method, f"/sandbox/ann/{path}", **fields)
    assert first.headers.get(HEADER) == "true", first.text
    if path == "stream":
        start = next(line for line in first.text.splitlines() if line.startswith("data: "))
        assert json.loads(start[6:])["recreated"] is True
    elif path in ("shell", "pip/install"):
        assert first.json()["recreated"] is True
    assert (await place.shell("true"))["recreated"] is False


async def test_a_request_that_nobody_waits_for_tells_nobody(place: Place) -> None:
    await place.lose()
    asking = asyncio.create_task(place.shell("echo up > up; sleep 30"))
    while (await place.client.get("/sandboxes")).json()["total"] == 0:
        await asyncio.sleep(0.01)
    home = place.service.sandboxes.find("ann")
    while home is None or not home.execution_count:
        await asyncio.sleep(0.01)
        home = place.service.sandboxes.find("ann")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await place.shell("true"))["recreated"] is True


async def test_those_who_ask_at_once_are_all_told(place: Place) -> None:
    await place.lose()
    slow = asyncio.create_task(place.shell("sleep 0.3"))
    quick = await asyncio.gather(*(place.shell("true") for _ in range(3)))
    assert all(answer["recreated"] for answer in [*quick[:1], await slow])
    assert (await place.shell("true"))["recreated"] is False


async def test_a_sandbox_that_could_not_be_made_is_told_of_later(place: Place) -> None:
    await place.lose()
    place.backend.create_error = SandboxCreationError("not now")
    refused = await place.client.get("/sandbox/ann/files")
    assert refused.status_code == 400 and HEADER not in refused.headers
    place.backend.create_error = None
    assert (await place.shell("true"))["recreated"] is True


async def test_what_a_user_asked_for_is_no_loss(place: Place) -> None:
    for path in ("stop", "restart"):
        assert HEADER not in (await place.client.post(f"/sandbox/ann/{path}")).headers
        assert (await place.shell("true"))["recreated"] is False
    assert (await place.client.delete("/sandbox/ann")).json()["status"] == "deleted"
    assert (await place.shell("true"))["recreated"] is False
    assert (await place.client.get("/sandbox/bob/files")).headers.get(HEADER) is None


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_service_that_ended_took_the_sandboxes_along(tmp_path: Path, how: str) -> None:
    service = ServiceProcess(tmp_path / "s", SANDBOX_MODE="fake", TMPDIR=str(tmp_path)).start()
    with service.client() as client:
        for user in ("ann", "bob", "gone"):
            client.post(f"/sandbox/{user}/create")
        client.delete("/sandbox/gone")
    getattr(service, how)()
    service.start()
    service.kill()  # nobody was told in between
    service.start()
    try:
        url = service.url.replace("http", "ws", 1) + "/sandbox/ann/ws"
        for expected in (True, False):
            with connect(url, additional_headers={"X-API-Key": service.key}) as socket:
                socket.send(json.dumps({"command": "true"}))
                assert json.loads(socket.recv(timeout=30))["recreated"] is expected
                while json.loads(socket.recv(timeout=30))["event"] != "result":
                    pass
        with service.client() as client:
            answers = [
                client.post(f"/sandbox/{user}/shell", json={"command": "true"}).json()
                for user in ("bob", "gone")
            ]
            assert [answer["recreated"] for answer in answers] == [True, False]
    finally:
        service.stop()
