"""Kill the processes that ended commands left running, because a limit forbids them; or the
processes of all commands, before the sandbox ends."""

from typing import Any, List, Optional

from ..loop import Loop
from ..wire import Wire
from .kill_tree import TreeKill
from .process_table import Children


class Leftovers:
    """The job of one sweep: a tree kill for each command that has ended, or for all commands."""

    wants_turn = False

    def __init__(self, loop: Loop, children: Children[Any], wire: Wire) -> None:
        self._loop = loop
        self._children = children
        self._wire = wire
        self._waiting = 0
        self._survivors = 0

    def start(self, running_too: bool = False) -> None:
        keepers = self._children.keepers() if running_too else self._children.idle()
        trees: List[Optional[int]] = [*keepers]
        if running_too or self._children.direct_owner is None:
            trees.append(None)  # the processes of a direct command have no keeper
        self._waiting = len(trees)
        for keeper in trees:
            kill = TreeKill(self._loop, self._children, keeper, self._swept)
            self._loop.call_later(0, kill.round)
        if not trees:
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
