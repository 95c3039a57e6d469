"""Avoid the wait of the first move into a cgroup of version 1.

A process that enters a cgroup has the kernel wait until no process is in the middle of a fork:
10 ms, during which no group can be made or removed either. It need not wait if another process has
entered one just before. So while sandboxes are made one after the other, the spawner enters the
group that it is in already every millisecond, which moves no process and takes 20 us.

Version 2 needs none of it: processes are born in their groups (`jail.clone`).
"""

from __future__ import annotations

import contextlib
import os
import time

from .cgroups import find_own_group

_BEAT_SECONDS = 0.001


class KeepAlive:
    """Does nothing where it is not ``wanted``, or where the group may not be entered."""

    def __init__(self, wanted: bool) -> None:
        self._group = -1
        self._beat_at = 0.0
        if wanted:
            with contextlib.suppress(OSError):  # an ordinary user's own group may be another's
                self._group = os.open(find_own_group(), os.O_WRONLY | os.O_CLOEXEC)

    def until_beat(self) -> float | None:
        """Seconds until `beat` has to be called; None if it never has to be."""
        return max(0.0, self._beat_at - time.monotonic()) if self._group >= 0 else None

    def beat(self) -> None:
        """Enter our own group, if it is time. The first time takes as long as any process waits."""
        if self.until_beat() != 0.0:
            return
        try:
            os.write(self._group, b"0")
        except OSError:
            self.close()
        self._beat_at = time.monotonic() + _BEAT_SECONDS

    def close(self) -> None:
        if self._group >= 0:
            os.close(self._group)
            self._group = -1
