"""Tests of what a new start finds on disk.

Records are damaged, from before a reboot, or from another version. None of it keeps the rest from
working, and no process is killed that is not surely ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from hoststate import HostState, clean_since, is_alive, start_time
from owners import usable

from paracle_sandbox.backends.native.backend import NativeBackend

DAMAGED = {
    "truncated": b'{"id": "bad", "instance": 0, "tok',
    "garbage": os.urandom(512),
    "empty": b"",
    "no object": b"[1, 2]\n",
    "deep": b"[" * 100_000,
    "large": b'{"instance": 0, "id": "bad", "x": "' + b"x" * 4_000_000 + b'"}\n',
    "wrong types": b'{"id": "bad", "instance": "0", "token": [], "init": 7, "cgroups": "/"}\n',
    "odd numbers": b'{"id": "bad", "instance": -1, "token": "t", "created_at": "never", '
    b'"owner": {"pid": "x"}, "config": 3, "labels": []}\n',
    "huge number": b'{"id": "bad", "instance": ' + b"9" * 5000 + b"}\n",
    "foreign groups": b'{"id": "bad", "instance": 0, "token": "t", '
    b'"cgroups": {"memory": "/sys/fs/cgroup"}}\n',
    "future": b'{"schema": 99, "id": "bad", "instance": 0, "token": "t", "kind": {"new": true}}\n',
}


def paracle(place, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", "sandbox", *words],
        env=place.environment(SANDBOX_MODE="native"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
async def test_a_damaged_record_is_in_nobodys_way(place, managing, content):
    """R21: list, create, destroy and cleanup work beside it."""
    (place.state / "instances").mkdir(mode=0o700, exist_ok=True)
    (place.state / "bad.json").write_bytes(content)
    async with managing() as manager:
        sandbox = await manager.create()
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
        listed = [found.sandbox_id for found in await manager.backend.list_sandboxes()]
        assert sandbox.sandbox_id in listed and len(listed) <= 2
        (place.state / "bad.json").write_bytes(content)
        await manager.destroy(sandbox.sandbox_id)
        await manager.backend.destroy("bad")
        (place.state / "bad.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["a fifo.json", "a directory.json", "a link.json"])
async def test_what_is_no_file_is_no_record(place, managing, tmp_path, name):
    """R21: the sweep neither waits for it nor follows it."""
    path = place.state / name
    if "fifo" in name:
        os.mkfifo(path)
    elif "directory" in name:
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    async with managing() as manager:
        sandbox = await manager.create()
        assert len(await manager.backend.list_sandboxes()) == 1
        await manager.destroy(sandbox.sandbox_id)
        await manager.backend.sweep()
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@pytest.fixture
def bystander():
    """Start a process of this user that has nothing to do with sandboxes."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


async def test_after_a_reboot_sandboxes_are_lost_and_nobody_else_is_hurt(place, owner, bystander):
    """R29: no process of the records lives, and their numbers belong to others now."""
    before = HostState.take(place)
    async with owner("loops", "3") as process:
        ids = await process.hear("ready")
        records = {path: path.read_text() for path in place.state.glob("*.json")}
        os.kill(process.process.pid, signal.SIGKILL)
    await clean_since(before, place, but_records=True)
    for path, text in records.items():
        lines = []
        for line in text.splitlines():
            content = json.loads(line)
            for key in ("init", "owner"):
                if key in content:
                    content[key] = {
                        "pid": bystander, "start": start_time(bystander), "boot": "another-boot",
                    }  # fmt: skip
            lines.append(json.dumps(content))
        path.write_text("\n".join(lines) + "\n")
    backend = NativeBackend(place.settings())
    listed = await backend.list_sandboxes()
    assert {found.sandbox_id for found in listed} == set(ids)
    assert {(found.state, found.owner_alive) for found in listed} == {("lost", False)}
    assert paracle(place, "cleanup", "--force").returncode == 0
    assert is_alive(bystander)
    assert await backend.list_sandboxes() == []
    await usable(place)
    await clean_since(before, place)


async def test_sandboxes_of_another_version_run_on(place, owner):
    """R30: a living owner keeps its sandboxes, whatever its records say and leave out."""
    before = HostState.take(place)
    async with owner("loops", "2") as process:
        ids = await process.hear("ready")
        running = place.processes()
        for number, path in enumerate(sorted(place.state.glob("*.json"))):
            content = json.loads(path.read_text().splitlines()[-1])
            kept = ("id", "slot", "instance", "token", "cgroups", "init")
            older = {key: content[key] for key in kept if key in content}
            newer = {**content, "schema": 7, "owner": {"host": "a"}, "images": [{"layers": [1]}]}
            path.write_text(json.dumps(newer if number % 2 else older) + "\n")
        backend = NativeBackend(place.settings())
        assert {found.sandbox_id for found in await backend.list_sandboxes()} == set(ids)
        shown = paracle(place, "list")
        assert shown.returncode == 0 and "Traceback" not in shown.stderr, shown.stderr
        assert paracle(place, "cleanup", "--force").returncode == 0
        await usable_beside(place, ids)
        assert running.keys() <= place.processes().keys(), "a sandbox of another version was ended"
        process.process.kill()
    await clean_since(before, place, but_records=True)
    await usable(place)
    await clean_since(before, place)


async def usable_beside(place, ids: list[str]) -> None:
    backend = NativeBackend(place.settings())
    from paracle_sandbox.manager import SandboxManager

    async with SandboxManager(2, backend=backend) as manager:
        sandbox = await manager.create()
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
        listed = {found.sandbox_id for found in await backend.list_sandboxes()}
        assert listed == {sandbox.sandbox_id, *ids}
    await backend.close()
