"""Network namespaces of sandboxes that end, kept until nobody waits for a processor.

The kernel takes a namespace apart when nobody has it any more: in the background, in a millisecond,
and many together in little more than that. So those of sandboxes that are about to be killed are
held here, and let go when it is quiet or there are many. All works without.
"""

from __future__ import annotations

import contextlib
import os

from . import kernel

_MANY = 64


class EndingNetworks:
    """A descriptor each; no process is in them when their sandbox has ended."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, pidfd: int, kind: str) -> None:
        """That of a process which lives. What others are connected to has to go at once."""
        if kind != "none":
            return
        with contextlib.suppress(OSError):  # it does not, or the kernel cannot
            self._held.append(kernel.network_of(pidfd))

    def let_go(self, quiet: bool = False) -> None:
        """All of them, if it is quiet or there are many."""
        if quiet or len(self._held) >= _MANY:
            for fd in self._held:
                os.close(fd)
            self._held.clear()
