"""The texts of programs that were written for one run, and what becomes of them after it.

Whoever waits for a result need not wait until its text is removed, nor need the next program. So
that is done a moment later, or before anybody looks.
"""

import os
from typing import Dict, List

from ..loop import Loop

LATER_SECONDS = 0.005


class Texts:
    """Paths, by the stream of the command that needs them. Each is alone in its folder."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._needed: Dict[int, bytes] = {}
        self._spent: List[bytes] = []

    def need(self, stream: int, path: bytes) -> None:
        self._needed[stream] = path

    def ended(self, stream: int) -> None:
        path = self._needed.pop(stream, None)
        if path is None:
            return
        if not self._spent:
            self._loop.call_later(LATER_SECONDS, self.remove)
        self._spent.append(path)

    def remove(self) -> None:
        """All that nobody needs any more. What a program has put beside its text is its own."""
        spent, self._spent = self._spent, []
        for path in spent:
            for remove, what in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
                try:
                    remove(what)
                except OSError:
                    pass  # the program was there before us
