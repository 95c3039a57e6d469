"""A scene for programs that use up what they can: their sandbox, a neighbour, and host witnesses.

``async with Scene() as scene`` gives a manager with state of its own. When it ends, everything is
closed and the machine must be Clean (faults/hoststate.py). ``scene.neighbour()`` runs a heartbeat
in a second sandbox meanwhile; its 99th percentile is compared with a baseline taken just before.
Who lists the processes of a sandbox is a ``Witness``: the host's kernel, or for a sandbox with a
kernel of its own whoever can ask that one from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from paracle_sandbox.backends.base import Backend
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from hoststate import CLEAN_SECONDS, HostState, Place, clean_since, is_alive  # noqa: E402, F401

MIB = 1 << 20
BEAT_SECONDS = 0.05
# Shorter delays are not noticed, and a machine that runs other programs has them anyway.
UNNOTICED_SECONDS = 0.5
ANSWER_SECONDS = 1.0
# The time that a loaded machine may add to any deadline.
SLACK_SECONDS = 1.5

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="the host's witnesses read cgroups of native sandboxes: run as root"
)


class Witness(Protocol):
    """Count from outside what runs in a sandbox.

    Its methods raise OSError if the sandbox has ended.
    """

    own_kernel: bool  # it may end for want of memory, and does not count refused processes

    def processes(self, sandbox: Sandbox) -> list[int]:
        """Return all processes of one sandbox, zombies included."""

    def tasks(self, sandbox: Sandbox) -> int:
        """Return how many processes and threads it has now."""

    def programs(self, sandbox: Sandbox) -> list[str]:
        """Return the processes that are neither the guest nor its keepers, without zombies."""


class Scene:
    """A manager on directories and uids of its own, and what the host sees of its sandboxes.

    ``kind`` makes the backend, ``configure`` the configurations, and ``witness_kind`` the object
    that lists the processes. Tests on other backends than native set their own. ``beside`` is how
    many processes a sandbox's cgroup has beside it, which are neither its own nor in its pid
    namespace.
    """

    kind: Callable[[Settings], Backend] = NativeBackend
    configure: Callable[..., SandboxConfig] = SandboxConfig
    witness_kind: Callable[[Scene], Witness]  # set to HostWitness, which is defined below
    beside = 0

    def __init__(self, **settings: object) -> None:
        self.place = Place(Path(tempfile.mkdtemp(prefix="paracle-scene-")))
        self.backend = type(self).kind(self.place.settings(**settings))
        self.manager = SandboxManager(16, backend=self.backend)
        self.witness = type(self).witness_kind(self)
        self._groups: dict[str, dict[str, str]] = {}

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
                assert not listed & self._groups.keys(), "sandboxes are left"
                await until(lambda: not self._left_cgroups(), CLEAN_SECONDS, "no cgroup is left")
                await clean_since(self.before, self.place)
                await until(lambda: not self.survivors(), CLEAN_SECONDS, "no process is left")
        finally:
            self.place.remove()

    async def sandbox(self, **config: object) -> Sandbox:
        sandbox = await self.manager.create(type(self).configure(**config))
        await self.backend.usage(sandbox.sandbox_id)  # this finds the cgroup of a container
        owned = self.backend._owned[sandbox.sandbox_id]
        groups = owned.record["cgroups"] if self.backend.name == "native" else owned.cgroups
        self._groups[sandbox.sandbox_id] = dict(groups)
        return sandbox

    def programs(self, sandbox: Sandbox) -> list[str]:
        return self.witness.programs(sandbox)

    def survivors(self) -> set[str]:
        """Return the host's processes of any sandbox that there was: its programs, or the kernel
        they had."""
        found = set(self.place.processes().values())
        for group in self._left_cgroups():
            with contextlib.suppress(OSError):  # it goes with its last process
                found |= set(Path(group, "cgroup.procs").read_text().split())
        return found

    def _left_cgroups(self) -> set[str]:
        paths = {path for groups in self._groups.values() for path in groups.values()}
        return {path for path in paths if os.path.exists(path)}

    def figure(self, sandbox: Sandbox, kind: str, name: str) -> str:
        """Read one file of its cgroup. ``kind`` is the v1 controller."""
        groups = self.groups(sandbox)
        return Path(groups.get(kind) or groups["unified"], name).read_text()

    def groups(self, sandbox: Sandbox) -> dict[str, str]:
        """Return its cgroups by v1 controller. A single one is called unified."""
        return self._groups[sandbox.sandbox_id]

    def volume(self, sandbox: Sandbox) -> Path:
        """Return a directory of the file system that the workspaces of this scene share."""
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

    def watching_pids(self, sandbox: Sandbox) -> AbstractAsyncContextManager[list[int]]:
        """Sample on the host how many tasks the sandbox has."""
        return sampling(lambda: self.witness.tasks(sandbox))

    def watching_memory(self, sandbox: Sandbox) -> AbstractAsyncContextManager[list[int]]:
        """Sample the peak memory of the sandbox.

        When memory has ended a sandbox, it cannot be read any more.
        """
        return sampling(lambda: self.memory_peak(sandbox))

    @contextlib.asynccontextmanager
    async def neighbour(self) -> AsyncIterator[None]:
        """Run a second sandbox that must not notice what happens inside the block."""
        other = await self.sandbox()
        baseline, during = Heartbeat(self.manager, other), Heartbeat(self.manager, other)
        async with baseline:
            await asyncio.sleep(2.0)
        async with during:
            yield
        # A kernel of its own takes longer to start a program, and any load makes that longer.
        during.compare(baseline, UNNOTICED_SECONDS * (2 if self.witness.own_kernel else 1))


class HostWitness:
    """Read the host's own lists: every process inside is also one of the host's, in a cgroup."""

    own_kernel = False

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def processes(self, sandbox: Sandbox) -> list[int]:
        return [int(pid) for pid in self._scene.figure(sandbox, "pids", "cgroup.procs").split()]

    def tasks(self, sandbox: Sandbox) -> int:
        return int(self._scene.figure(sandbox, "pids", "pids.current")) - self._scene.beside

    def programs(self, sandbox: Sandbox) -> list[str]:
        """Our own processes block all signals, or are beside the guest in an instance."""
        found = []
        scene = self._scene
        deep = pid_depth(scene.backend.init_pid(sandbox.sandbox_id)) if scene.beside else 0
        for pid in self.processes(sandbox):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                ours = blocked & (1 << 14) or pid_depth(pid) < deep
                if not ours and "State:\tZ" not in status:
                    found.append(f"{pid} {status.splitlines()[0]}")
        return found


Scene.witness_kind = HostWitness


@contextlib.asynccontextmanager
async def sampling(figure: Callable[[], int]) -> AsyncIterator[list[int]]:
    """Take samples of a figure until the block ends, and a last one then, if it can still be
    read."""
    samples: list[int] = []

    async def sample() -> None:
        while True:
            with contextlib.suppress(OSError):
                samples.append(figure())
            await asyncio.sleep(0.01)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.wait([task])
        with contextlib.suppress(OSError):
            samples.append(figure())


class Heartbeat:
    """Run a program every 50 ms in a sandbox and ask the manager a question, and measure how long
    each takes."""

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
        if self._since is not None:  # one under way counts, or a stopped heart would not
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

    def compare(self, baseline: Heartbeat, unnoticed_seconds: float) -> None:
        """Raise AssertionError if the neighbour noticed."""
        assert self._beats, "the neighbour's heart stood still"
        allowed = max(5 * baseline.p99, unnoticed_seconds)
        assert self.p99 < allowed, f"p99 {self.p99:.3f} s against {baseline.p99:.3f} s before"
        # The list is empty if the block ended during the first beat, which was judged above.
        slowest = percentile(self._answers or [0.0], 0.99)
        assert slowest < ANSWER_SECONDS, f"the manager answered after {slowest:.3f} s"


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def until(condition, seconds: float, what: str) -> float:
    """Wait for a condition. Returns how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


def pid_depth(pid: int) -> int:
    """Return in how many pid namespaces a process has a number, counted from the host's."""
    return len(Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split())


def resident_bytes() -> int:
    """Return the resident memory of this process, which is the manager's."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
