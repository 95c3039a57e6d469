"""The room a manager has: a fixed number of slots, taken at once or waited for in turn.

Decisions are synchronous, so no lock is ever held across I/O: whoever gets a slot owns it before
the next await. A waiter is handed its slot by the one who frees it, so nobody slips in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

from .errors import SandboxLimitError

DEFAULT_LIMIT = 10


class Slots:
    """At most ``limit`` holders at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._kept = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def take(self) -> None:
        """A slot now, or SandboxLimitError."""
        if self.taken >= self.limit:
            raise self.full()
        self.taken += 1

    async def wait(self) -> None:
        """A slot as soon as one is free. Raises SandboxLimitError when none will be, because
        every one is held by a sandbox that was kept on purpose."""
        if self.taken < self.limit:
            self.taken += 1
            return
        if self._kept >= self.limit:
            raise self.full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The slot may have been handed over in the same moment: pass it on.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.free()
            raise
        finally:
            if turn in self._waiters:
                self._waiters.remove(turn)

    def free(self, *, kept: bool = False) -> None:
        """Give one back, to the longest waiter if there is one."""
        self._kept -= kept
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def keep(self) -> None:
        """One holder will stay until somebody removes it by name; nobody may wait for that."""
        self._kept += 1
        if self._kept < self.limit:
            return
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_exception(self.full())

    def full(self) -> SandboxLimitError:
        return SandboxLimitError(f"Maximum number of sandboxes ({self.limit}) reached")


def one_limit(max_concurrent: int | None, max_sandboxes: int | None) -> int:
    """The limit that has two names."""
    given = {limit for limit in (max_concurrent, max_sandboxes) if limit is not None}
    if len(given) > 1:
        raise ValueError("max_concurrent and max_sandboxes are one limit; give one of them")
    name = "max_sandboxes" if max_concurrent is None else "max_concurrent"
    return at_least_one(name, given.pop() if given else DEFAULT_LIMIT)


def at_least_one(name: str, value: int) -> int:
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least one, not {value}")
    return int(value)
