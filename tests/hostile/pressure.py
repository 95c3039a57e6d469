"""A scene for programs that use up what they can: their sandbox, a neighbour, and host witnesses.

``async with Scene() as scene`` gives a manager with state of its own. When it ends, everything is
closed and the machine must be Clean (faults/hoststate.py). ``scene.neighbour()`` runs a heartbeat
in a second sandbox meanwhile; its 99th percentile is compared with a baseline taken just before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from paracle_sandbox.backends.base import Backend
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from hoststate import CLEAN_SECONDS, HostState, Place, clean_since, is_alive  # noqa: E402, F401

MIB = 1 << 20
BEAT_SECONDS = 0.05
# Below this nobody notices, and a machine that runs other things too shows as much by itself.
UNNOTICED_SECONDS = 0.5
ANSWER_SECONDS = 1.0
# What a loaded machine may add to any deadline.
SLACK_SECONDS = 1.5

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="the host's witnesses read cgroups of native sandboxes: run as root"
)


class Scene:
    """A manager on directories and uids of its own, and what the host sees of its sandboxes.

    ``kind`` makes the backend and ``configure`` the configurations; tests on another than native
    put theirs in their place. ``beside`` is how many processes a sandbox's cgroup has beside it,
    which are neither its own nor in its pid namespace."""

    kind: Callable[[Settings], Backend] = NativeBackend
    configure: Callable[..., SandboxConfig] = SandboxConfig
    beside = 0

    def __init__(self, **settings: object) -> None:
        self._cgroups: dict[str, set[str]] = {}
        self.place = Place(Path(tempfile.mkdtemp(prefix="paracle-scene-")))
        self.backend = type(self).kind(self.place.settings(**settings))
        self.manager = SandboxManager(16, backend=self.backend)

    async def __aenter__(self) -> Scene:
        # The first sandbox starts the spawner, whose descriptors stay until the end.
        self.before = HostState.take(self.place)
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            await self.manager.close()
            listed = {info.sandbox_id for info in await self.backend.list_sandboxes()}
        finally:
            await self.backend.close()
        try:
            if kind is None:
                assert not listed & self._cgroups.keys(), "sandboxes are left"
                await until(lambda: not self._left_cgroups(), CLEAN_SECONDS, "no cgroup is left")
                await clean_since(self.before, self.place)
        finally:
            self.place.remove()

    async def sandbox(self, **config: object) -> Sandbox:
        sandbox = await self.manager.create(type(self).configure(**config))
        await self.backend.usage(sandbox.sandbox_id)  # a container's cgroup is known from then on
        self._cgroups[sandbox.sandbox_id] = set(self.groups(sandbox).values())
        return sandbox

    def survivors(self) -> list[str]:
        """Processes of all its sandboxes, also of those that are destroyed."""
        groups = [Path(path, "cgroup.procs") for path in self._left_cgroups()]
        listed = {pid for group in groups if group.exists() for pid in group.read_text().split()}
        return [*self.place.processes().values(), *sorted(listed)]

    def _left_cgroups(self) -> list[str]:
        return [path for paths in self._cgroups.values() for path in paths if os.path.exists(path)]

    def processes(self, sandbox: Sandbox) -> list[int]:
        """The processes of one sandbox, as the host counts them, zombies included."""
        return [int(pid) for pid in self.figure(sandbox, "pids", "cgroup.procs").split()]

    def programs(self, sandbox: Sandbox) -> list[str]:
        """Those that are not ours: neither the guest nor its keepers, which block all signals, nor
        what is beside them in an instance."""
        found = []
        deep = pid_depth(self.backend.init_pid(sandbox.sandbox_id)) if self.beside else 0
        for pid in self.processes(sandbox):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                ours = blocked & (1 << 14) or pid_depth(pid) < deep
                if not ours and "State:\tZ" not in status:
                    found.append(f"{pid} {status.splitlines()[0]}")
        return found

    def figure(self, sandbox: Sandbox, kind: str, name: str) -> str:
        """One file of its cgroup: ``kind`` is the v1 controller."""
        groups = self.groups(sandbox)
        return Path(groups.get(kind) or groups["unified"], name).read_text()

    def groups(self, sandbox: Sandbox) -> dict[str, str]:
        """Its cgroups by v1 controller; a single one is called unified."""
        owned = self.backend._owned[sandbox.sandbox_id]
        return owned.record["cgroups"] if self.backend.name == "native" else owned.cgroups

    def volume(self, sandbox: Sandbox) -> Path:
        """A directory of the file system that the workspaces of this scene share."""
        for store in self.place.state.glob("store-*"):
            return store
        return Path(f"/proc/{self.backend.init_pid(sandbox.sandbox_id)}/root/workspace")

    def cpu_seconds(self, sandbox: Sandbox) -> float:
        groups = self.groups(sandbox)
        if "unified" in groups:
            words = self.figure(sandbox, "cpu", "cpu.stat").split()
            return int(words[words.index("usage_usec") + 1]) / 1e6
        return int(self.figure(sandbox, "cpuacct", "cpuacct.usage")) / 1e9

    def memory_peak(self, sandbox: Sandbox) -> int:
        v2 = "unified" in self.groups(sandbox)
        return int(
            self.figure(sandbox, "memory", "memory.peak" if v2 else "memory.max_usage_in_bytes")
        )

    @contextlib.asynccontextmanager
    async def watching_pids(self, sandbox: Sandbox) -> AsyncIterator[list[int]]:
        """Samples of how many tasks it has, taken on the host all the while."""
        samples: list[int] = []

        async def sample() -> None:
            while True:
                with contextlib.suppress(OSError):
                    tasks = int(self.figure(sandbox, "pids", "pids.current"))
                    samples.append(tasks - self.beside)
                await asyncio.sleep(0.01)

        task = asyncio.create_task(sample())
        try:
            yield samples
        finally:
            task.cancel()

    @contextlib.asynccontextmanager
    async def neighbour(self) -> AsyncIterator[None]:
        """A second sandbox that must not notice what happens inside the block."""
        other = await self.sandbox()
        baseline, during = Heartbeat(self.manager, other), Heartbeat(self.manager, other)
        async with baseline:
            await asyncio.sleep(2.0)
        async with during:
            yield
        during.compare(baseline)


class Heartbeat:
    """A program every 50 ms in a sandbox, and a question to the manager: how long each takes."""

    def __init__(self, manager: SandboxManager, sandbox: Sandbox) -> None:
        self._manager = manager
        self._sandbox = sandbox
        self._beats: list[float] = []
        self._since: float | None = None
        self._answers: list[float] = []
        self._asked: float | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def __aexit__(self, kind: object, *_: object) -> None:
        if self._since is not None:  # one under way counts, or a heart that stopped would not
            self._beats.append(time.monotonic() - self._since)
        if self._asked is not None:
            self._answers.append(time.monotonic() - self._asked)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            self._since = time.monotonic()
            result = await self._sandbox.execute(["true"])
            self._beats.append(time.monotonic() - self._since)
            self._since = None
            assert result["exit_code"] == 0
            self._asked = time.monotonic()
            assert await self._manager.get(self._sandbox.sandbox_id) is self._sandbox
            await self._sandbox.get_stats()
            self._answers.append(time.monotonic() - self._asked)
            self._asked = None
            await asyncio.sleep(BEAT_SECONDS)

    @property
    def p99(self) -> float:
        return percentile(self._beats, 0.99)

    def compare(self, baseline: Heartbeat) -> None:
        """Raises AssertionError when the neighbour noticed."""
        assert self._beats, "the neighbour's heart stood still"
        allowed = max(5 * baseline.p99, UNNOTICED_SECONDS)
        assert self.p99 < allowed, f"p99 {self.p99:.3f} s against {baseline.p99:.3f} s before"
        # None at all: the block ended during the first beat, which was judged above.
        slowest = percentile(self._answers or [0.0], 0.99)
        assert slowest < ANSWER_SECONDS, f"the manager answered after {slowest:.3f} s"


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def until(condition, seconds: float, what: str) -> float:
    """Wait for a condition; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


def pid_depth(pid: int) -> int:
    """In how many pid namespaces a process has a number, from the host's on."""
    return len(Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split())


def resident_bytes() -> int:
    """Of this process, which is the manager's."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
