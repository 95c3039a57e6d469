"""The warm pool: children that are made ahead of need, confined, and given to the next request.

It is filled when no request has come for a moment, since a caller who asks once is likely to ask
again at once, and is not to wait for it. While callers ask in quick succession only a few are kept
ready: the processors are left to the requests.
"""

from __future__ import annotations

import time
from typing import Any

from .child import Child
from .limits.sandbox_resources import Grant
from .shape import Shape

_QUIET_SECONDS = 0.03
# A caller that asked twice within such a time is likely to go on like that.
_BURST_SECONDS = 0.05
_FEW = 4


class WarmPool:
    """``modules``: what the zygote has to import before it forks the first of them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.size: int = options["stock"]
        self.shape = Shape(**options["stock_shape"])
        self.grant = Grant.asked(options["stock_grant"])
        self.modules: list[str] = options["idle_modules"]
        self.children: list[Child] = []
        self._quiet_at = 0.0
        self._asked_at = 0.0
        self._burst_ends_at = 0.0

    def note_request(self) -> None:
        """Any request has come."""
        self._quiet_at = time.monotonic() + _QUIET_SECONDS

    def note_create(self, *, taken: bool) -> None:
        """A sandbox was asked for. As long as enough are ready, that is no burst."""
        now = time.monotonic()
        is_second = now < self._asked_at + _BURST_SECONDS
        is_short = not taken or len(self.children) < _FEW
        self._burst_ends_at = now + _BURST_SECONDS if is_second and is_short else 0.0
        self._asked_at = now

    @property
    def in_burst(self) -> bool:
        """Whether sandboxes are asked for faster than they are made ahead."""
        return time.monotonic() < self._burst_ends_at

    def seconds_until_quiet(self) -> float:
        """0.0 if it is quiet now."""
        return max(0.0, self._quiet_at - time.monotonic())

    def take(self, shape: Shape) -> Child | None:
        """A child of this shape that lives: one that was killed meanwhile must not be handed out.
        The last one made comes first, because most of its memory is still in the caches."""
        while shape == self.shape and self.children:
            child = self.children.pop()
            if not child.has_ended:
                return child
        return None

    def discard(self, child: Child) -> None:
        """It has ended."""
        if child in self.children:
            self.children.remove(child)

    def give_up(self) -> None:
        """None can be made. The next request meets the same step, and reports it."""
        self.size = 0

    @property
    def is_full(self) -> bool:
        return not self.size or (len(self.children) >= self.size and not self.modules)

    @property
    def wants_child(self) -> bool:
        """Whether one is to be made now."""
        most = self.size if not self.seconds_until_quiet() else _FEW if self.in_burst else 0
        return len(self.children) < min(most, self.size)
