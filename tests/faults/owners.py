"""The owners of the sandboxes of a fault test: a process to be killed, or a manager in this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from hoststate import HostState, Place, children_of, clean_since, start_time

import loop_watch
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.manager import SandboxManager

_SOURCE = Path(__file__).resolve().parents[2] / "src"
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)


class Owner:
    """One owner process, which ``async with`` starts, and ends at the latest on the way out."""

    def __init__(self, place: Place, *arguments: str, **environment: str) -> None:
        self._place = place
        self._arguments = arguments
        self._environment = environment

    async def __aenter__(self) -> Owner:
        watched = loop_watch.environment(_SOURCE, *filter(None, _PATHS))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("owner_program.py")),
            *self._arguments,
            env=self._place.environment(**watched, **self._environment),
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.communicate()

    async def hear(self, key: str, seconds: float = 60) -> object:
        """Return the value of the first line that has the key."""
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            while line := await self.process.stdout.readline():
                if key in (message := json.loads(line)):
                    return message[key]
        raise AssertionError(f"the owner ended without saying {key!r}")

    async def lines(self) -> list[dict[str, object]]:
        out, _ = await self.process.communicate()
        return [json.loads(line) for line in out.splitlines()]

    @property
    def launcher(self) -> int:
        (launcher,) = children_of(self.process.pid)
        return launcher

    @property
    def spawner(self) -> int:
        (spawner,) = children_of(self.launcher)
        return spawner


@contextlib.asynccontextmanager
async def native_manager(place: Place, **settings: object) -> AsyncIterator[SandboxManager]:
    """Provide a manager in this process, which must leave the machine Clean."""
    before = HostState.take(place)
    backend = NativeBackend(place.settings(**settings))
    manager = SandboxManager(64, backend=backend)
    try:
        yield manager
    finally:
        await manager.close()
        await backend.close()
    await clean_since(before, place)


async def usable(place: Place) -> None:
    """Check that a new start on the same directories works, finds nothing old, and leaves
    nothing."""
    async with native_manager(place) as manager:
        sandbox = await manager.create()
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
        listed = await manager.backend.list_sandboxes()
        assert [found.sandbox_id for found in listed] == [sandbox.sandbox_id]


def helpers() -> tuple[int, int]:
    """Return the launcher and the spawner that this process started last."""
    launchers = [pid for pid in children_of(os.getpid()) if "jail.launch" in _command(pid)]
    launcher = max(launchers, key=start_time)
    (spawner,) = children_of(launcher)
    return launcher, spawner


def zygote() -> int:
    """Return the process that sandboxes are forks of."""
    (found,) = children_of(helpers()[1])
    return found


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def resident_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
