"""Host uids for sandboxes: a block for each spawner, one number for each sandbox.

Blocks are claimed machine-wide, whatever state directory a spawner uses: two sandboxes of one
uid could reach each other where only the uid keeps them apart.
"""

from __future__ import annotations

import os
from collections import deque

from ..host.own_directory import open_own_directory
from .numbers import claim_number, release_number

BLOCK = 8192
_PLACE = "/run/paracle-sandbox-uids"


class UidBlock:
    """The numbers of one spawner."""

    def __init__(self, base: int) -> None:
        self._dir = open_own_directory(_PLACE, make=True)
        self._block, self._lock = claim_number(self._dir)
        self._first = base + self._block * BLOCK
        # Not all of them in the queue from the start: every process of every sandbox would have it.
        self._taken = 0
        self._free: deque[int] = deque()

    def take(self) -> int:
        if self._taken < BLOCK:
            self._taken += 1
            return self._first + self._taken - 1
        if not self._free:
            raise OSError(f"{BLOCK} sandboxes of one spawner live already")
        return self._free.popleft()

    def give_back(self, uid: int) -> None:
        # To the end of the queue: a number rests as long as it can before it is used again.
        self._free.append(uid)

    def close(self) -> None:
        release_number(self._dir, self._block, self._lock)
        os.close(self._dir)
