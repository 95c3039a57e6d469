"""Sample what a sandbox uses while it works: SandboxMonitor.

One task takes samples at a fixed pace. The first is taken by start() itself and the last by
stop(), so that a run of a few milliseconds has data too. CPU is measured between two samples of
this monitor, so other readers of the same sandbox do not disturb it. Memory that was taken and
given back, or killed for, between two samples is told by the kernel's own marks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, cast

from ..backends.base import Usage
from ..errors import SandboxError, SandboxNotFoundError
from ..results import Averages, Monitoring, Stats
from .command_options import checked_seconds
from .outcome import MIB
from .sandbox import Sandbox

logger = logging.getLogger(__name__)

MAX_HISTORY = 100
WARNING_PERCENT = 80.0
LIMIT_PERCENT = 95.0


class Sample(Stats):
    """The stats of one moment, in ISO 8601."""

    timestamp: str


# Given the sample; may be a coroutine function. What it returns is not looked at.
Callback = Callable[[Sample], Any]


class SandboxMonitor:
    """Samples a sandbox every ``interval_seconds`` inside ``async with``.

    ``on_warning`` is called for each sample above 80 % of the memory or CPU limit,
    ``on_limit_exceeded`` for each above 95 % of the memory limit; what was used since the sample
    before counts as well. A callback that raises is logged and does not end the monitoring.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        interval_seconds: float = 1.0,
        on_warning: Callback | None = None,
        on_limit_exceeded: Callback | None = None,
    ) -> None:
        if not checked_seconds("interval_seconds", interval_seconds):
            raise ValueError("interval_seconds must be more than 0 seconds")
        self.sandbox = sandbox
        self.interval_seconds = interval_seconds
        self._on_warning = on_warning
        self._on_limit_exceeded = on_limit_exceeded
        self._history: deque[Sample] = deque(maxlen=MAX_HISTORY)
        self._cpu: deque[float] = deque(maxlen=MAX_HISTORY)
        self._previous: tuple[float, float] | None = None
        self._usage: Usage | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the first sample and keep sampling. No-op while it runs."""
        if self._task is None:
            self._previous = self._usage = None
            await self._sample()
            self._task = asyncio.create_task(self._keep_sampling())

    async def stop(self) -> None:
        """Take the last sample and end. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        await self._sample()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def get_history(self, limit: int | None = None) -> list[Sample]:
        """The last ``limit`` samples, oldest first; at most 100 are kept."""
        history = list(self._history)
        return history if limit is None else history[len(history) - min(limit, len(history)) :]

    def get_latest(self) -> Stats | None:
        """The last sample as plain stats."""
        if not self._history:
            return None
        stats = {**self._history[-1]}
        del stats["timestamp"]
        return cast(Stats, stats)

    def get_averages(self) -> Averages:
        """Over the samples kept; zeros when there are none. The first sample, taken before
        anything ran, opens the first interval and so has no CPU value to count."""
        return {
            "cpu_percent": _mean(self._cpu),
            "memory_percent": _mean(sample["memory_percent"] for sample in self._history),
            "memory_mb": _mean(sample["memory_mb"] for sample in self._history),
        }

    def get_peaks(self) -> Averages:
        """The highest of each. Memory comes from the kernel's own high-water mark, which also
        sees what happened between two samples."""
        peak_mb = max((max(s["memory_mb"], s["memory_peak_mb"]) for s in self._history), default=0)
        limit_mb = self.sandbox.config.memory_mb
        return {
            "cpu_percent": max(self._cpu, default=0.0),
            "memory_percent": 100.0 * peak_mb / limit_mb,
            "memory_mb": float(peak_mb),
        }

    def get_summary(self) -> Monitoring:
        """Return what an execution reports as ``stats["monitoring"]``."""
        return {
            "averages": self.get_averages(),
            "peaks": self.get_peaks(),
            "history_samples": len(self._history),
        }

    async def _keep_sampling(self) -> None:
        due = time.monotonic()
        gone = False
        while not gone:
            # By the clock and not by adding pauses: a slow sample does not stretch the pace.
            due = max(due + self.interval_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            gone = not await self._sample()

    async def _sample(self) -> bool:
        """Take a sample; return whether there was still something to look at."""
        try:
            stats = await self.sandbox.get_stats()
        except SandboxNotFoundError:
            return False
        except SandboxError as error:
            if self.sandbox.is_running:
                logger.warning("No sample of sandbox %s: %s", self.sandbox.sandbox_id, error)
            return self.sandbox.is_running
        sample = self._record(stats)
        await self._warn(sample)
        return True

    def _record(self, stats: Stats) -> Sample:
        now, cpu_seconds = time.monotonic(), stats["cpu_seconds"]
        sample: Sample = {**stats, "timestamp": datetime.now(UTC).isoformat()}
        # The first opens the first interval. What the sandbox used before is not the program's.
        sample["cpu_percent"] = 0.0
        if self._previous is not None and now > self._previous[0]:
            then, used = self._previous
            sample["cpu_percent"] = max(0.0, 100.0 * (cpu_seconds - used) / (now - then))
            self._cpu.append(sample["cpu_percent"])
        self._previous = (now, cpu_seconds)
        self._history.append(sample)
        return sample

    async def _warn(self, sample: Sample) -> None:
        cpu_limit = self.sandbox.config.cpu_cores * WARNING_PERCENT
        memory = max(sample["memory_percent"], self._percent_between())
        if memory > WARNING_PERCENT or sample["cpu_percent"] > cpu_limit:
            await self._call(self._on_warning, sample)
        if memory > LIMIT_PERCENT:
            await self._call(self._on_limit_exceeded, sample)

    def _percent_between(self) -> float:
        """The most memory since the sample before, as far as it was more than ever."""
        before, now = self._usage, self.sandbox.last_usage
        self._usage = now
        if before is None or now is None:
            return 0.0
        if now.oom_kills > before.oom_kills:
            return 100.0
        if now.memory_peak_bytes <= before.memory_peak_bytes:
            return 0.0
        return 100.0 * now.memory_peak_bytes / (self.sandbox.config.memory_mb * MIB)

    async def _call(self, callback: Callback | None, sample: Sample) -> None:
        if callback is None:
            return
        try:
            answer = callback(sample)
            if inspect.isawaitable(answer):
                await answer
        except Exception:  # the caller's code: whatever it raises must not end the monitoring
            logger.exception("A callback of the monitor of %s failed", self.sandbox.sandbox_id)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
