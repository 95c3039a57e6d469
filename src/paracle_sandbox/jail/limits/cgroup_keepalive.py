"""Keeping the way into control groups short.

A process that enters a group has the kernel wait until nobody is in the middle of a fork: 10 ms,
during which no group can be made or removed either. It need not wait if another has entered one
just before. So while one sandbox after the other is asked for, the spawner enters its own group
again and again, which moves nobody and takes some 20 us.
"""

from __future__ import annotations

import time

from .cgroups import Cgroups

# Whoever has asked twice within such a time is likely to go on like that.
_BURST_SECONDS = 0.05
_BEAT_SECONDS = 0.001
# After so long it may have cooled down: entering would make the spawner itself wait.
_COLD_SECONDS = 0.005
# How long after it entered its group a child says that it is confined.
_CONFINED_SECONDS = 0.003


class Heat:
    """When somebody has entered a group last, and who will. Without groups nobody waits."""

    def __init__(self, cgroups: Cgroups | None) -> None:
        self._cgroups = cgroups
        self._entered_at = 0.0
        self._can_beat = cgroups is not None
        self._asked_at = 0.0
        self._asked_twice = False

    def asked(self, *, to_make: bool = True) -> None:
        """Somebody wants a sandbox. As long as there are enough, nobody enters a group."""
        now = time.monotonic()
        self._asked_twice = to_make and now < self._asked_at + _BURST_SECONDS
        self._asked_at = now

    @property
    def in_burst(self) -> bool:
        return self._asked_twice and time.monotonic() < self._asked_at + _BURST_SECONDS

    @property
    def lasts(self) -> bool:
        return self._cgroups is None or time.monotonic() < self._entered_at + _COLD_SECONDS

    def entering(self) -> None:
        """A child does, now; if it has to wait, `entered` will tell."""
        if self.lasts:
            self._entered_at = time.monotonic()

    def entered(self) -> None:
        """A child has said that it is confined."""
        self._entered_at = max(self._entered_at, time.monotonic() - _CONFINED_SECONDS)

    def until_beat(self) -> float | None:
        """Seconds; None if there is nothing to keep."""
        if not (self._can_beat and self.in_burst and self.lasts):
            return None
        return max(0.0, self._entered_at + _BEAT_SECONDS - time.monotonic())

    def beat(self) -> None:
        """If it is time."""
        if self._cgroups is not None and self.until_beat() == 0.0:
            self._can_beat = self._cgroups.enter_own()
            if self._can_beat:
                self._entered_at = time.monotonic()
