"""Network namespaces of sandboxes that have ended, kept until nobody waits for a processor.

The kernel takes a namespace apart when nobody has it any more: in the background, in a millisecond,
and many together in little more than that. So while one sandbox after the other is asked for, their
namespaces are held here, empty, and let go when it is quiet or there are many.
"""

from __future__ import annotations

import os

_MANY = 64


class EndedNetworks:
    """What is left of them: a descriptor each."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, fd: int) -> None:
        self._held.append(fd)
        if len(self._held) >= _MANY:
            self.let_go()

    def let_go(self) -> None:
        for fd in self._held:
            os.close(fd)
        self._held.clear()
