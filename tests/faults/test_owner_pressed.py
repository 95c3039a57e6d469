"""Owners under pressure.

Programs fork from their first moment, output floods meet little memory, and a state directory has
no room or may not be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hoststate import HostState, Place, clean_since, is_alive
from owners import usable

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import SandboxCleanupError, SandboxCreationError
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.command import Command

MIB = 1 << 20
SPARE_BYTES = 64 * MIB
FLOODS = 50
PF_EXITING = 4

FORKS = """
import os, sys
for _ in range(100):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            sys.stdin.read()
        os._exit(0)
print("forked", flush=True)
sys.stdin.read()
"""


def cgroup_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


async def until_forked(command: Command) -> None:
    said = b""
    async for _, chunk in command.output():
        said += chunk
        if said.startswith(b"forked"):
            return
    raise AssertionError(f"it ended: {said!r}")


def uid_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1])


def is_ending(pid: int) -> bool:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return bool(int(fields[6]) & PF_EXITING)


async def test_who_forks_from_the_first_moment_on_is_never_outside_its_cgroup(place, managing):
    """R17: the host looks at every process of the sandboxes, again and again, while they fork."""
    seen: set[tuple[int, int]] = set()
    outside = []
    looked = asyncio.Condition()
    async with managing(stock=2) as manager:

        async def storm() -> None:
            sandbox = await manager.create()
            command = await sandbox.start_code(FORKS, stdin=True, timeout=120)
            await until_forked(command)
            for _ in range(2):  # the second of these began after all were there
                async with looked:
                    await looked.wait()
            await manager.destroy(sandbox.sandbox_id)

        def look() -> None:
            for pid, started in place.processes():
                with contextlib.suppress(OSError):
                    groups = cgroup_of(pid)
                    # A child that the spawner has just forked runs no program yet, and is root's.
                    # A process that is ending has left its groups.
                    if uid_of(pid) in place.uids and not is_ending(pid):
                        seen.add((pid, started))
                        if place.cgroup_name not in groups:
                            outside.append((pid, groups))

        storms = asyncio.gather(*(storm() for _ in range(6)))
        while not storms.done():
            await asyncio.to_thread(look)
            async with looked:
                looked.notify_all()
        await storms
    assert outside == []
    assert len(seen) > 6 * 50, "it has looked at too few to say anything"


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """Provide a memory cgroup of our own, for one owner."""
    kind = Path("/sys/fs/cgroup/memory")
    top = (kind if kind.is_dir() else Path("/sys/fs/cgroup")) / f"paracle-test-{os.getpid()}"
    top.mkdir()
    yield top
    top.rmdir()


async def test_floods_do_not_end_an_owner_that_has_little_memory(place, owner, little_memory):
    """R14: fifty programs print without end. Their owner may use 64 MB more than it does idle."""
    v1 = (little_memory / "memory.limit_in_bytes").exists()
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    before = HostState.take(place)
    async with owner("floods", str(FLOODS)) as process:
        await process.hear("idle")
        pid = process.process.pid
        baseline = resident_bytes(pid)
        (little_memory / "cgroup.procs").write_text(str(pid))
        # The memory that it used before is charged to another group.
        (little_memory / names[0]).write_text(str(SPARE_BYTES))
        os.kill(pid, 10)  # SIGUSR1: begin
        outcomes = await process.hear("outcomes", 240)
        assert is_alive(pid), "the kernel ended the owner"
        assert outcomes == ["output"] * FLOODS
        assert resident_bytes(pid) < baseline + SPARE_BYTES
    await clean_since(before, place, but_records=True)


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such process")


def mounted(place: Place, *options: str) -> None:
    subprocess.run(["mount", *options, str(place.state)], check=True)


@pytest.fixture
def small_state(tmp_path: Path) -> Iterator[Place]:
    """Provide a place whose state directory is a file system of its own, with room for few
    files."""
    place = Place(tmp_path)
    mounted(place, "-t", "tmpfs", "-o", "size=1m,nr_inodes=24,mode=700", "tmpfs")
    try:
        yield Place(tmp_path)  # only now: it names its cgroups by the file system
    finally:
        subprocess.run(["umount", "-l", place.state], check=True)


async def test_a_state_directory_without_room_for_a_file_is_told_and_passes(small_state):
    """R13: running sandboxes go on, sandboxes can be destroyed, and new ones fail with the reason.

    When there is room again, all works.
    """
    place = small_state
    backend = NativeBackend(place.settings())
    async with SandboxManager(8, backend=backend) as manager:
        there, other = await manager.create(), await manager.create()
        fillers = []
        with contextlib.suppress(OSError):
            while True:
                filler = place.state / f"filler-{len(fillers)}"
                filler.touch()
                fillers.append(filler)
        with pytest.raises(SandboxCreationError, match="PARACLE_STATE_DIR"):
            await manager.create()
        assert (await there.execute("echo here"))["stdout"] == "here\n"
        pid = backend.init_pid(other.sandbox_id)
        await manager.destroy(other.sandbox_id)
        assert not is_alive(pid)
        assert [found.sandbox_id for found in await backend.list_sandboxes()] == [there.sandbox_id]
        for filler in fillers:
            filler.unlink()
        again = await manager.create()
        assert (await again.execute("echo again"))["stdout"] == "again\n"
    await backend.close()
    await usable(place)


@pytest.fixture
def failing_state(tmp_path: Path) -> Iterator[Place]:
    """Provide a place whose state directory is on a disk that can be made to fail."""
    place = Place(tmp_path)
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    mounted(place, "-o", "loop,errors=remount-ro", str(disk))
    place.state.chmod(0o700)
    try:
        yield Place(tmp_path)
    finally:
        subprocess.run(["umount", "-l", place.state], check=True)


async def test_a_state_directory_whose_disk_fails_is_told_and_leaves_nothing(failing_state):
    """R13: the disk answers with errors, under open files, as the kernel does it."""
    place = failing_state
    backend = NativeBackend(place.settings())
    manager = SandboxManager(8, backend=backend)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(pytest.raises(SandboxCleanupError, match="record"))
        stack.push_async_callback(manager.close)
        there, other = await manager.create(), await manager.create()
        mounted(place, "-o", "remount,abort")
        with pytest.raises(OSError):
            (place.state / "new").touch()
        with pytest.raises(SandboxCreationError, match="PARACLE_STATE_DIR"):
            await manager.create()
        assert (await there.execute("echo here"))["stdout"] == "here\n"
        pids = [backend.init_pid(sandbox.sandbox_id) for sandbox in (there, other)]
        # Its record cannot be removed, which is reported. The sandbox itself is gone.
        with pytest.raises(SandboxCleanupError, match="record"):
            await manager.destroy(other.sandbox_id)
        assert not is_alive(pids[1])
    await backend.close()
    assert not is_alive(pids[0])
    assert place.processes() == {} and place.cgroups() == set()
