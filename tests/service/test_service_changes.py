"""The kept files are those inside, whatever was done to them, and only changes are read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest
from service_place import Place

from paracle_sandbox import Sandbox, SandboxConfig
from paracle_sandbox.results import FileInfo
from paracle_sandbox.sandbox import files
from paracle_sandbox.sandbox.files import Changes
from paracle_sandbox.service.users.kept_files import Workspace
from turns import Turns

# After each of them the kept files are compared with those inside.
STEPS = [
    "mkdir -p a/b/c d; echo 1 > a/b/c/f; echo 2 > d/g; echo 3 > h",
    "echo 4 > a/b/c/f",
    "cp -p h saved; printf 'X\\n' > h; touch -r saved h; rm saved",  # same size, same time
    "chmod 700 h",
    "mv h i",
    "mv a moved",
    "mkdir one two; echo x > one/f; echo y > two/f; touch -d @1 one/f two/f",
    "mv one three; mv two one; mv three two",  # the same names, sizes and times as before
    "rm -r moved; echo now a file > moved",
    "rm moved; mkdir moved; echo in it > moved/f",
    "rm d/g; ln -s /etc/passwd d/g",
    "rm d/g; echo again > d/g",
    "ln d/g d/linked",
    "echo through the link > d/linked",
    "for n in $(seq 150); do echo $n > many-$n; done",
    "rm many-1*",
    "rm -r *",
]


def tree(directory: Path) -> dict[str, object]:
    """Files with what is in them, and directories."""
    found: dict[str, object] = {}
    for base, folders, names in os.walk(directory):
        for name in (*folders, *names):
            path = Path(base, name)
            if not path.is_symlink():
                found[str(path.relative_to(directory))] = path.is_dir() or path.read_bytes()
    return found


async def test_the_kept_files_are_those_inside(place: Place) -> None:
    home = place.service.sandboxes.find("ann")
    assert home is not None
    inside = Path(place.backend.directory_of(home.sandbox.id))
    for step in STEPS:
        done = await place.shell(step)
        assert done["success"] and done["files_kept"], (step, done)
        assert tree(home.workspace.directory) == tree(inside), step
    # What the next sandbox begins with is what it has, too.
    await place.shell("echo 1 > f; mkdir -p a/b")
    await place.client.delete("/sandbox/ann")
    await place.shell("echo 2 > a/b/f; rm f")
    assert tree(home.workspace.directory) == {"a": True, "a/b": True, "a/b/f": b"2\n"}


async def test_those_of_programs_that_end_side_by_side(place: Place) -> None:
    home = place.service.sandboxes.find("ann")
    assert home is not None
    inside = Path(place.backend.directory_of(home.sandbox.id))
    for number in range(5):
        commands = (f"echo {number} > same; echo {one} > f{one}-{number}" for one in range(4))
        done = await asyncio.gather(*map(place.shell, commands))
        assert all(one["files_kept"] for one in done)
        assert tree(home.workspace.directory) == tree(inside)


async def test_only_what_changed_is_told(place: Place) -> None:
    home = place.service.sandboxes.find("ann")
    assert home is not None
    await place.shell("mkdir d; for n in $(seq 300); do echo $n > d/$n; done")
    first = await home.sandbox.list_changes()
    assert first.is_all and len(first.entries) == 302
    same = await home.sandbox.list_changes(first.token)
    assert (same.is_all, same.entries, same.gone) == (False, [], [])
    await home.sandbox.run_command("echo new > d/7; rm d/8 kept")
    some = await home.sandbox.list_changes(same.token)
    assert [one["path"] for one in some.entries] == ["d/7"]
    assert sorted(some.gone) == ["d/8", "kept"]
    # Who names another listing than the last gets all of it.
    assert (await home.sandbox.list_changes(same.token)).is_all
    assert (await place.shell("true"))["files_kept"]


async def test_too_many_files_are_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 20)
    many = await place.shell("for n in $(seq 30); do echo $n > f$n; done")
    assert many["success"] and many["files_kept"] is False
    assert "more than 20 files" in many["files_error"]
    body = {"path": "one-more", "content": "x"}
    refused = await place.client.post("/sandbox/ann/file", json=body)
    assert refused.status_code == 507 and "more than 20 files" in refused.json()["error"]
    few = await place.shell("rm f1* f2*")
    assert (few["files_kept"], few["files_error"]) == (True, None)
    home = place.service.sandboxes.find("ann")
    assert home is not None
    inside = Path(place.backend.directory_of(home.sandbox.id))
    assert tree(home.workspace.directory) == tree(inside)


class Lister:
    """A sandbox of which only listings are asked. It counts the turns that others have had since
    the last one was handed over."""

    config = SandboxConfig()

    def __init__(self, *listings: Changes) -> None:
        self.others = Turns()
        self._listings = list(listings)

    async def list_changes(self, *_: object) -> Changes:
        self.others.count = 0
        return self._listings.pop(0)


async def test_others_have_their_turn_while_a_long_listing_is_gone_through(tmp_path: Path) -> None:
    """As many files as a disk holds, each below 270 directories."""
    size = 20_000
    paths = ["d/" * 270 + str(number) for number in range(size)]
    entries: list[FileInfo] = [
        {"name": "", "path": path, "kind": "file", "size": 0, "mode": 0, "modified": 0.0}
        for path in paths
    ]
    again = [cast(FileInfo, dict(entry)) for entry in entries]
    strange = [f"{path}-never-kept" for path in paths]
    lister = Lister(
        Changes(entries, [], "one", True),
        Changes(again, [], "two", True),
        Changes([], strange, "three", False),
    )
    sandbox: Any = lister
    workspace = Workspace(tmp_path / "kept")
    await workspace.restore(cast(Sandbox, sandbox))
    assert len(workspace.known) == size and lister.others.count >= 50
    # Once for what is listed, once for what of it has changed, once for what is gone.
    await workspace.save(cast(Sandbox, sandbox))
    assert len(workspace.known) == size and lister.others.count >= 150
    await workspace.save(cast(Sandbox, sandbox))
    assert len(workspace.known) == size and lister.others.count >= 50
    assert workspace.token == "three"
    lister.others.close()


async def test_a_path_that_is_gone_twice_is_gone(tmp_path: Path) -> None:
    """The guest says so, and may say anything."""
    entry: FileInfo = {
        "name": "", "path": "f", "kind": "file", "size": 0, "mode": 0, "modified": 0.0,
    }  # fmt: skip
    lister = Lister(Changes([entry], [], "one", True), Changes([], ["f", "f"], "two", False))
    sandbox: Any = lister
    workspace = Workspace(tmp_path / "kept")
    await workspace.restore(cast(Sandbox, sandbox))
    await workspace.save(cast(Sandbox, sandbox))
    assert workspace.known == {} and workspace.token == "two"
    lister.others.close()
