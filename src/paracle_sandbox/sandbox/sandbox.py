"""A sandbox, as a user holds it: programs, Python, files and figures of one isolated place."""

from __future__ import annotations

import time

from ..backends.base import Usage
from ..results import Isolation, Stats
from .outcome import MIB, disk_breach, memory_alarm
from .packages import SandboxPackages


class Sandbox(SandboxPackages):
    """One isolated place. ``async with`` makes it and removes it, whatever happens inside.

    Everything may be used concurrently. A program that fails is a result; one that we stopped
    is an exception: SandboxTimeoutError, ResourceLimitError, or SandboxExecutionError when the
    sandbox itself broke, each with what had been printed.
    """

    @property
    def posture(self) -> Isolation:
        """What keeps its programs in. The layers are proved by ``paracle sandbox health``."""
        return {"backend": self._backend.name, "missing": self._backend.lacking()}

    async def get_stats(self) -> Stats:
        """What it uses now; CPU over the time since the previous call, or since the start."""
        self._live()
        usage = await self._backend.usage(self.sandbox_id)
        self._saw(usage)
        limit = self.config.memory_mb * MIB
        return {
            "cpu_percent": self._cpu_percent(usage),
            "cpu_seconds": usage.cpu_seconds,
            "memory_bytes": usage.memory_bytes,
            "memory_mb": usage.memory_bytes / MIB,
            "memory_percent": 100.0 * usage.memory_bytes / limit,
            "memory_limit_mb": self.config.memory_mb,
            "memory_peak_mb": usage.memory_peak_bytes / MIB,
            "disk_mb": usage.disk_bytes / MIB,
            "disk_limit_mb": self.config.disk_mb,
            "processes": usage.processes,
            "network_rx_bytes": usage.network_rx_bytes,
            "network_tx_bytes": usage.network_tx_bytes,
            "duration_seconds": time.monotonic() - self._started_at,
        }

    def _cpu_percent(self, usage: Usage) -> float:
        now = time.monotonic()
        before, cpu_before = self._cpu_mark
        self._cpu_mark = (now, usage.cpu_seconds)
        elapsed = now - before
        return max(0.0, 100.0 * (usage.cpu_seconds - cpu_before) / elapsed) if elapsed else 0.0

    async def check_limits(self) -> None:
        """Raises ResourceLimitError when memory is all but used up, or the disk is full."""
        self._live()
        usage = await self._backend.usage(self.sandbox_id)
        if usage.disk_full:
            usage = await self._backend.exact_usage(self.sandbox_id)
        breach = memory_alarm(usage, self.config) or disk_breach(usage, self.config)
        if breach is not None:
            raise breach.error(self.sandbox_id)
