"""Measure a container: its usage, how full its files are, and whether memory ended it.

The figures are those of the container's cgroup where that is of this machine. Elsewhere the engine
gives samples, and a small program inside the container says how full its tmpfs mounts are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...config import SandboxConfig
from ...errors import SandboxError
from ..base import Usage
from ..machine.cgroup_usage import MemoryPeak, cgroups_of, read_cpu, read_usage
from ..machine.workspaces import is_nearly_full
from .attach_channel import AttachChannel
from .engine import Engine, EngineRefused
from .events import Watch

_DEATH_SECONDS = 3.0

_NOBODY = "65534:65534"
_ANSWER_SECONDS = 10.0
_MAX_ANSWER = 4096
_PROGRAM = """
import os, sys
while os.read(0, 1):
    answer = ""
    for place in sys.argv[1:]:
        found = os.statvfs(place)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        no_more = found.f_files > 0 and not found.f_ffree  # gVisor does not count files
        answer += "%d %d %d " % (used, found.f_blocks * found.f_frsize, no_more)
    os.write(1, answer.strip().encode() + b"\\n")
"""


@dataclass
class Metered:
    """A container, and what was learned of it for its figures. ``pid`` is its first process as the
    engine's machine counts; ``cgroups`` are empty elsewhere; ``cpu_before`` is what it took to make
    it."""

    container: str
    config: SandboxConfig
    pid: int = 0
    cgroups: dict[str, str] = field(default_factory=dict)
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    cpu_before: float = 0.0
    last: Usage = field(default_factory=Usage)


class Meter:
    """Reads the cgroup where that is of this machine, and asks the engine elsewhere."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine = engine
        self._watch = watch

    async def measure(self, metered: Metered) -> Usage:
        """Return what the container uses now; when it has ended, what it used last."""
        return await self._measure_running(metered) or await self._last(metered)

    async def measure_foreign(self, reference: str) -> Usage | None:
        """Return the figures of a container that another process made; None when it has ended."""
        return await self._measure_running(Metered(reference, SandboxConfig(network_mode="bridge")))

    async def start_counting(self, metered: Metered) -> None:
        """Count CPU time from here: what it took to make the container is not its programs'."""
        # When the container has ended already, its user hears of it elsewhere.
        with contextlib.suppress(FileNotFoundError, EngineRefused):
            if await self._find_process(metered):
                metered.cpu_before = await self._cpu(metered)

    async def _find_process(self, metered: Metered) -> bool:
        """Look up its first process and its cgroups, unless they are known. Returns whether there
        is such a process."""
        if not metered.cgroups:
            if not metered.pid:
                metered.pid = int((await self._state(metered.container)).get("Pid") or 0)
            if metered.pid:
                metered.cgroups = cgroups_of(metered.pid, metered.container)
        return bool(metered.pid)

    async def _cpu(self, metered: Metered) -> float:
        if metered.cgroups:
            return read_cpu(metered.cgroups)
        return usage_of(await self._engine.stats(metered.container) or {}).cpu_seconds

    async def _measure_running(self, metered: Metered) -> Usage | None:
        """Return what a running container uses; None when it has ended."""
        if not await self._find_process(metered):
            return None
        try:
            if metered.cgroups:
                mode = metered.config.network_mode
                usage = read_usage(metered.cgroups, metered.pid, network_mode=mode)
                return metered.peak.of(_without_making(usage, metered))
            sample = await self._engine.stats(metered.container)
            # When it has ended, Docker gives a sample without figures, and Podman gives none.
            if not sample or not sample.get("memory_stats"):
                return None
            usage = metered.peak.of(_without_making(usage_of(sample), metered))
            if metered.config.network_mode == "host":
                usage = replace(usage, network_rx_bytes=None, network_tx_bytes=None)
            return usage
        except (FileNotFoundError, EngineRefused):
            return None

    async def _last(self, metered: Metered) -> Usage:
        death = await self._watch.cause(metered.container, _DEATH_SECONDS)
        if not death.oom:
            return replace(metered.last, processes=0)
        kills = metered.last.oom_kills + 1
        peak = metered.config.memory_mb << 20
        return replace(metered.last, processes=0, memory_peak_bytes=peak, oom_kills=kills)

    async def _state(self, reference: str) -> dict[str, Any]:
        try:
            return dict((await self._engine.inspect(reference))["State"])
        except EngineRefused:
            return {}


def _without_making(usage: Usage, metered: Metered) -> Usage:
    return replace(usage, cpu_seconds=max(0.0, usage.cpu_seconds - metered.cpu_before))


def usage_of(sample: Mapping[str, Any]) -> Usage:
    """Return the figures of an engine's sample. The engine does not count processes killed for lack
    of memory, and Podman does not say how much of the memory is page cache."""
    memory = sample.get("memory_stats") or {}
    cache = _page_cache(memory.get("stats") or {})
    used = max(0, int(memory.get("usage", 0)) - cache)
    networks = (sample.get("networks") or {}).values()
    cpu = (sample.get("cpu_stats") or {}).get("cpu_usage") or {}
    return Usage(
        cpu_seconds=int(cpu.get("total_usage", 0)) / 1e9,
        memory_bytes=used,
        memory_peak_bytes=max(used, int(memory.get("max_usage", 0))),
        cache_bytes=cache,
        processes=int((sample.get("pids_stats") or {}).get("current", 0)),
        network_rx_bytes=sum(int(one.get("rx_bytes", 0)) for one in networks),
        network_tx_bytes=sum(int(one.get("tx_bytes", 0)) for one in networks),
    )


def _page_cache(detail: Mapping[str, Any]) -> int:
    """Return the page cache of the whole group; cgroup v1 has names of its own for that. Shared
    memory is left out, because it cannot be dropped, and v1 counts it as "cache"."""
    return sum(
        max(0, int(detail.get(f"total_{name}", detail.get(name, 0))))
        for name in ("active_file", "inactive_file")
    )


class Space:
    """How full the tmpfs mounts of one container are, where its files are not on this machine.

    Only a program inside can tell. A small one beside the guest is started for the first question,
    and answers each line with a line. It has a user of its own, so that programs of the sandbox can
    neither stop it nor speak for it, and it ends with its connection. ``places`` are the mounts,
    each with a limit of its own.
    """

    def __init__(self, engine: Engine, container: str, places: Sequence[str]) -> None:
        self._engine = engine
        self._container = container
        self._places = places
        self._channel: AttachChannel | None = None
        self._turn = asyncio.Lock()

    async def look(self) -> tuple[int, bool] | None:
        """Return the bytes used in all, and whether one of the mounts is full; None when that is
        unknown."""
        async with self._turn:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    return _read_answer(await self._ask(), len(self._places))
            except (SandboxError, OSError, ValueError):  # a timeout is an OSError
                await self.close()
                return None
            except BaseException:  # its answer would be the next one's
                await self.close()
                raise

    async def _ask(self) -> bytes:
        if self._channel is None:
            self._channel = await self._engine.execute(
                self._container,
                {
                    "AttachStdin": True,
                    "AttachStdout": True,
                    "AttachStderr": True,
                    "Tty": False,
                    "User": _NOBODY,
                    "WorkingDir": "/",
                    "Cmd": ["python3", "-I", "-S", "-c", _PROGRAM, *self._places],
                },
            )
        await self._channel.send(b"?")
        answer = b""
        while not answer.endswith(b"\n"):
            piece = await self._channel.receive()
            if not piece or len(answer) > _MAX_ANSWER:
                raise ConnectionError("it has ended")
            answer += piece
        return answer

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _read_answer(answer: bytes, places: int) -> tuple[int, bool]:
    numbers = [int(word) for word in answer.split()]
    if len(numbers) != 3 * places:
        raise ValueError("not an answer")
    found = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    full = any(is_nearly_full(used, limit) or no_more for used, limit, no_more in found)
    return sum(numbers[::3]), full
