"""Timing: many short runs, told as percentiles."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
PACE_SECONDS = 0.1
_ROW = 5


@dataclass(frozen=True)
class Times:
    """Durations of one thing done many times, in milliseconds."""

    name: str
    values: tuple[float, ...]

    def percentile(self, percent: float) -> float:
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p95(self) -> float:
        return self.percentile(95)

    @property
    def p99(self) -> float:
        return self.percentile(99)


async def timed(
    name: str, action: Callable[[], Awaitable[object]], count: int, pause_seconds: float = 0.0
) -> Times:
    """One run is thrown away first; the pause between runs is not counted."""
    await action()
    values = []
    for _ in range(count):
        if pause_seconds:
            await asyncio.sleep(pause_seconds)
        start = time.perf_counter()
        await action()
        values.append((time.perf_counter() - start) * 1e3)
    return Times(name, tuple(values))


async def timed_command(
    name: str, command: Sequence[str], count: int, pause_seconds: float = 0.0
) -> Times:
    """A program started from here with nothing between: no event loop's child watcher."""

    async def action() -> None:
        run_command(command)

    return await timed(name, action, count, pause_seconds)


async def timed_beside(
    name: str, command: Sequence[str], count: int, pause: float, ours: Callable[[], Awaitable[_T]]
) -> tuple[Times, _T]:
    """A command, one half before what it is compared with and one half after: a machine that
    becomes slower meanwhile does so for both."""
    before = await timed_command(name, command, count // 2, pause)
    found = await ours()
    after = await timed_command(name, command, count - count // 2, pause)
    return Times(name, before.values + after.values), found


async def timed_in_turns(
    actions: Mapping[str, Callable[[], Awaitable[object]]],
    count: int,
) -> dict[str, Times]:
    """Back to back in short rows, one action's after another's, so that whatever else the machine
    does meets all of them. The first of each row is not counted."""
    values: dict[str, list[float]] = {name: [] for name in actions}
    while len(next(iter(values.values()))) < count:
        for name, action in actions.items():
            row = await timed(name, action, min(_ROW, count))
            values[name] += row.values
    return {name: Times(name, tuple(found)) for name, found in values.items()}


def run_command(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr.decode(errors='replace')[-300:]}")


async def per_second(
    action: Callable[[int], Awaitable[object]], at_once: int, seconds: float
) -> float:
    """How many are finished each second when ``at_once`` are always under way."""
    finished = 0
    end = time.perf_counter() + seconds

    async def worker(number: int) -> None:
        nonlocal finished
        while time.perf_counter() < end:
            await action(number)
            finished += 1

    start = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(at_once)))
    return finished / (time.perf_counter() - start)


async def in_a_burst(action: Callable[[int], Awaitable[object]], at_once: int, count: int) -> float:
    """How many are finished each second when there are only so many, ``at_once`` under way."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await action(number)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return count / (time.perf_counter() - start)
