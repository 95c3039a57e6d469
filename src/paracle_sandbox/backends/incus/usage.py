"""Measure what an instance uses now, or used last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config import SandboxConfig
from ..base import Usage
from ..machine.cgroup_usage import MemoryPeak, cgroups_of, read_usage
from .instances import Instances
from .server import Refused
from .storage import Homes

# Numbers that a process of an instance has: the machine's and the instance's.
_INSTANCE_DEPTH = 2


@dataclass
class Metered:
    """An instance, and what was learned of it for its figures. ``pid`` is its first process as the
    server's machine counts; ``cgroups`` are empty elsewhere; ``cpu_before`` is what it took to make
    it; ``slot`` holds its files."""

    instance: str
    config: SandboxConfig
    slot: str
    pid: int = 0
    cgroups: dict[str, str] = field(default_factory=dict)
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    cpu_before: float = 0.0
    last: Usage = field(default_factory=Usage)


class Meter:
    """Reads the cgroup where that is of this machine, and asks the server elsewhere.

    ``beside`` processes of an instance are not its sandbox's, whose limit does not count them."""

    def __init__(self, instances: Instances, homes: Homes, beside: int) -> None:
        self._instances = instances
        self._homes = homes
        self._beside = beside

    async def start_counting(self, metered: Metered) -> None:
        """Count CPU time from here: what it took to make the instance is not its programs'."""
        usage = await self._figures(metered)
        metered.cpu_before = usage.cpu_seconds if usage else 0.0

    async def measure(self, metered: Metered) -> Usage:
        """Return what the instance uses now; when it has ended, what it used last."""
        usage = await self._measure_running(metered)
        if usage is None:
            return replace(metered.last, processes=0)
        if disk := await self._homes.usage(metered.slot, metered.config.disk_mb):
            usage = replace(usage, disk_bytes=disk[0], disk_full=disk[1])
        metered.last = usage
        return usage

    async def measure_foreign(self, name: str) -> Usage | None:
        """Return the figures of an instance that another process made; None when it has ended."""
        return await self._measure_running(Metered(name, SandboxConfig(network_mode="bridge"), ""))

    async def _measure_running(self, metered: Metered) -> Usage | None:
        """Return what a running instance uses; None when it has ended."""
        usage = await self._figures(metered)
        if usage is None:
            return None
        return replace(
            usage,
            processes=max(0, usage.processes - self._beside),
            cpu_seconds=max(0.0, usage.cpu_seconds - metered.cpu_before),
        )

    async def _figures(self, metered: Metered) -> Usage | None:
        try:
            if not metered.cgroups:
                state = await self._instances.state(metered.instance)
                metered.pid = int(state.get("pid") or 0)
                metered.cgroups = (
                    cgroups_of(metered.pid, metered.instance) if metered.pid > 0 else {}
                )
                if not metered.cgroups:
                    return usage_of(state) if metered.pid > 0 else None
            mode = metered.config.network_mode
            return metered.peak.of(read_usage(metered.cgroups, metered.pid, network_mode=mode))
        except (FileNotFoundError, Refused):
            return None


def guest_pid(cgroups: Mapping[str, str]) -> int:
    """Return the pid of the guest: the first process of a pid namespace inside the instance's own.

    Raises ProcessLookupError when it is gone.
    """
    group = Path(cgroups.get("unified") or cgroups.get("pids") or "/nowhere")
    for path in list(group.rglob("cgroup.procs")) if group.is_dir() else ():
        for pid in path.read_text(encoding="ascii").split():
            try:
                status = Path(f"/proc/{pid}/status").read_text(errors="replace")
            except OSError:
                continue
            numbers = status.partition("\nNSpid:")[2].split("\n")[0].split()
            # The instance's own first process has one number fewer.
            if len(numbers) > _INSTANCE_DEPTH and numbers[-1] == "1" and numbers[-2] != "1":
                return int(pid)
    raise ProcessLookupError("the guest is gone")


def usage_of(state: Mapping[str, Any]) -> Usage:
    """Return the server's own figures. The server does not count processes killed for lack of
    memory, and its figure of memory includes the page cache, which only the metrics of all
    instances at once show."""
    memory = state.get("memory") or {}
    used = int(memory.get("usage") or 0)
    cards = [one for name, one in (state.get("network") or {}).items() if name != "lo"]
    counters = [one.get("counters") or {} for one in cards]
    return Usage(
        cpu_seconds=int((state.get("cpu") or {}).get("usage") or 0) / 1e9,
        memory_bytes=used,
        memory_peak_bytes=max(used, int(memory.get("usage_peak") or 0)),
        processes=max(0, int(state.get("processes") or 0)),
        network_rx_bytes=sum(int(one.get("bytes_received") or 0) for one in counters),
        network_tx_bytes=sum(int(one.get("bytes_sent") or 0) for one in counters),
    )
