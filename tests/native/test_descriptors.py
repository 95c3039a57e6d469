"""An owner that runs out of descriptors gets typed errors, leaks nothing, and keeps its
sandboxes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# How many descriptors are free: from none to more than a sandbox needs.
_ROOMS = range(14)
_COMMON = """
import asyncio, contextlib, os, resource, sys
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import SandboxCleanupError, SandboxCreationError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
outcomes = []

def backend_in(place):
    return NativeBackend(Settings(state_dir=sys.argv[1] + place, data_dir=sys.argv[1] + "/data",
                                  template_build=False, stock=0))

def count():
    return len(os.listdir("/proc/self/fd"))

@contextlib.contextmanager
def only(room):
    '''As if the process could open so many files more.'''
    most = max(map(int, os.listdir("/proc/self/fd"))) + 8 + room
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, HARD))
    filled = []
    with contextlib.suppress(OSError):
        while True:
            filled.append(os.dup(0))
    for _ in range(room):
        os.close(filled.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
        for fd in filled:
            os.close(fd)

async def try_one(backend, room):
    sandbox = Sandbox(backend, f"with-{room}")
    try:
        with only(room):
            try:
                await sandbox.start()
                outcomes.append("made")
            finally:
                await sandbox.stop()
    except SandboxCreationError as error:
        assert "too many open files" in str(error).lower(), error
        assert "ulimit -n" in str(error) or error.step == "connect", error
        outcomes.append("refused")
"""
_LIVING = (
    _COMMON
    + """
async def main(rooms):
    backend = backend_in("/state")
    async with Sandbox(backend, "first") as first:
        await first.execute("true")
        await try_one(backend, 100)
        before = count()
        for room in rooms:
            await try_one(backend, room)
            assert count() == before, (room, before, count())
            assert [info.sandbox_id for info in await backend.list_sandboxes()] == ["first"]
        with only(0):
            await first.stop()  # there are some in reserve
        assert await backend.list_sandboxes() == []
    await backend.close()
"""
)
_STARTING = (
    _COMMON
    + """
async def main(rooms):
    for room in [100, *rooms]:
        if room != 100:
            before = count()
        backend = backend_in("/state")
        await try_one(backend, room)
        await backend.close()
        if room != 100:
            assert count() == before, (room, before, count())
"""
)
# This starts only the spawner, whatever it was given before.
_NONE_FOR_ITS_SPAWNER = (
    _COMMON
    + """
def allow(launcher, most):
    with open(f"/proc/{launcher}/task/{launcher}/children") as children:
        (spawner,) = map(int, children.read().split())
    resource.prlimit(spawner, resource.RLIMIT_NOFILE, (most, HARD))

async def main(rooms):
    backend = backend_in("/state")
    made = [Sandbox(backend, f"of-{number}") for number in range(3)]
    for sandbox in made:
        await sandbox.start()
    launcher = backend._spawners["default"]._process.pid
    allow(launcher, 4)
    try:
        await Sandbox(backend, "late").start()
    except SandboxCreationError as error:
        assert "too many open files" in str(error).lower(), error
        outcomes.append("refused")
    for sandbox in made:
        await backend.usage(sandbox.sandbox_id)
        await backend.exact_usage(sandbox.sandbox_id)
    for _ in range(2):
        try:
            await made[0].stop()
        except SandboxCleanupError as error:
            assert "too many open files" in str(error).lower(), error
            outcomes.append("left")
    listed = sorted(info.sandbox_id for info in await backend.list_sandboxes())
    assert listed == ["of-0", "of-1", "of-2"], (listed, outcomes)
    allow(launcher, HARD)
    await made[0].stop()
    assert (await made[1].execute("echo lives"))["stdout"] == "lives\\n"
    async with Sandbox(backend, "new"):
        outcomes.append("made")
    listed = sorted(info.sandbox_id for info in await backend.list_sandboxes())
    assert listed == ["of-1", "of-2"], listed
    await backend.close()
    assert outcomes == ["refused", "left", "left", "made"], outcomes
"""
)
_RUN = """
asyncio.run(main(range({first}, {end})))
assert outcomes[-1] == "made" and "refused" in outcomes, outcomes
print("done")
"""


@pytest.mark.parametrize(
    "program",
    [_LIVING, _STARTING, _NONE_FOR_ITS_SPAWNER],
    ids=["a spawner lives", "none yet", "none for its spawner"],
)
def test_nothing_leaks_however_many_descriptors_there_are(tmp_path: Path, program: str):
    done = subprocess.run(
        [sys.executable, "-c", program + _RUN.format(first=_ROOMS.start, end=_ROOMS.stop),
         str(tmp_path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("done\n"), done.stderr[-4000:]
    assert "never retrieved" not in done.stderr and "Traceback" not in done.stderr, done.stderr
