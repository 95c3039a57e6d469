"""Remove the program texts that were written for one run, after it.

Removing a text delays neither the result of its program nor the next program: it is done a moment
later, or before the next request that could see the file.
"""

import os
from typing import Dict, List

from ..loop import Loop

LATER_SECONDS = 0.005


class Texts:
    """The paths of the texts, by the stream of their command. Each text has a folder of its own."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._needed: Dict[int, bytes] = {}
        self._spent: List[bytes] = []

    def need(self, stream: int, path: bytes) -> None:
        """Keep the text until the command of this stream has ended."""
        self._needed[stream] = path

    def ended(self, stream: int) -> None:
        """Note that a stream has ended, so that its text can be removed."""
        path = self._needed.pop(stream, None)
        if path is None:
            return
        if not self._spent:
            self._loop.call_later(LATER_SECONDS, self.remove)
        self._spent.append(path)

    def remove(self) -> None:
        """Remove all texts that are no longer needed. Files that a program put beside it stay."""
        spent, self._spent = self._spent, []
        for path in spent:
            for remove, what in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
                try:
                    remove(what)
                except OSError:
                    pass  # the program has removed it, or put files beside it
