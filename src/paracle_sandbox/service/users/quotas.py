"""Quotas of one user. Decisions are synchronous, and a refusal says when to try again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...config import SandboxConfig
from ...settings import Settings
from ..errors import TooMany

_MINUTE = 60.0
# It is unknown when a slot comes free; this is a fair time to ask again.
_ASK_AGAIN_SECONDS = 1.0


@dataclass
class _User:
    started: deque[float]
    running: int = 0


class Executions:
    """Counts executions of each user: so many in a minute, so many at the same time."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = settings.user_rate
        self._at_once = settings.user_concurrent
        self._clock = clock
        self._users: dict[str, _User] = {}

    @contextmanager
    def one(self, user_id: str) -> Iterator[None]:
        """Count one execution for the length of the block. Raises TooMany."""
        user = self._users.setdefault(user_id, _User(deque()))
        now = self._clock()
        while user.started and user.started[0] <= now - _MINUTE:
            user.started.popleft()
        if len(user.started) >= self._per_minute:
            wait = math.ceil(user.started[0] + _MINUTE - now)
            raise TooMany(
                f"More than {self._per_minute} executions in a minute; wait {wait} s", max(1, wait)
            )
        if user.running >= self._at_once:
            raise TooMany(
                f"{self._at_once} executions run already; wait for one", _ASK_AGAIN_SECONDS
            )
        user.started.append(now)
        user.running += 1
        try:
            yield
        finally:
            user.running -= 1

    def running(self, user_id: str) -> int:
        return self._users[user_id].running if user_id in self._users else 0

    def forget_quiet(self) -> None:
        """Forget users that did nothing for a minute."""
        horizon = self._clock() - _MINUTE
        for user_id, user in list(self._users.items()):
            if not user.running and (not user.started or user.started[-1] <= horizon):
                del self._users[user_id]


def check_room(settings: Settings, held: list[SandboxConfig], wanted: SandboxConfig) -> None:
    """Raise TooMany if a user who holds these sandboxes may not have one more."""
    everything = [*held, wanted]
    figures = (
        ("sandboxes", len(everything), settings.user_sandboxes),
        ("CPU cores", sum(one.cpu_cores for one in everything), settings.user_cpu_cores),
        ("MB of memory", sum(one.memory_mb for one in everything), settings.user_memory_mb),
        ("MB of disk", sum(one.disk_mb for one in everything), settings.user_disk_mb),
    )
    for what, sum_of_all, allowed in figures:
        if sum_of_all > allowed:
            raise TooMany(
                f"The user may have {allowed:g} {what} in all and would have {sum_of_all:g}; "
                "destroy a sandbox first",
                _ASK_AGAIN_SECONDS,
            )
