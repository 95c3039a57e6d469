"""Killing what commands that have ended left running, when a limit says that it must not stay."""

from typing import Any, List, Optional

from .children import Children
from .kill import TreeKill
from .loop import Loop
from .wire import Wire


class Leftovers:
    """One sweep: a tree kill for each command that has ended."""

    wants_turn = False

    def __init__(self, loop: Loop, children: Children[Any], wire: Wire) -> None:
        self._loop = loop
        self._children = children
        self._wire = wire
        self._waiting = 0
        self._survivors = 0

    def start(self) -> None:
        idle: List[Optional[int]] = [*self._children.idle()]
        if self._children.direct_owner is None:
            idle.append(None)  # what a direct command left has no keeper
        self._waiting = len(idle)
        for keeper in idle:
            kill = TreeKill(self._loop, self._children, keeper, self._swept)
            self._loop.call_later(0, kill.round)
        if not idle:
            self._wire.result({"survivors": 0})

    def _swept(self, survivors: int) -> None:
        self._survivors += survivors
        self._waiting -= 1
        if self._waiting == 0 and not self._wire.finished:
            self._wire.result({"survivors": self._survivors})

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        pass

    def on_credit(self) -> None:
        pass

    def turn(self) -> None:
        pass

    def cancel(self) -> None:
        pass
