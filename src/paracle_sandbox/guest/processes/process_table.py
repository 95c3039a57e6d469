"""The table of the guest's children: by it, every process belongs to exactly one command.

    guest ── program ── its descendants         the direct command: no process between
          ├─ keeper ── program ── ...           every further command that runs beside it
          ├─ seed                               a Python forked ahead of need
          └─ nursery                            what seeds are forked from, in a series

The kernel gives orphans to their nearest subreaper. Each keeper is one, and so is the guest. So a
process with a keeper above it belongs to that keeper's command, and every other process below the
guest belongs to the direct command. There is one direct command at a time. It counts until the last
process that it left behind has ended; a command that starts meanwhile has a keeper.
"""

import os
import signal
from typing import Any, Dict, Generic, List, Optional, Set, TypeVar

from ..prefork.fork_server import Nursery
from ..prefork.preforked import Seed, fork_seed
from ..prefork.sibling import can_fork_sibling

Owner = TypeVar("Owner")


def _read(path: bytes) -> bytes:
    """Read a file. A file object would be slower, and this is done before each command."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = part = os.read(fd, 4096)
        while part:
            part = os.read(fd, 4096)
            text += part
        return text
    finally:
        os.close(fd)


class Children(Generic[Owner]):
    """The children that live.

    The owner of a child is its command; a keeper may outlive its owner.
    """

    def __init__(self) -> None:
        self._keepers: Dict[int, Optional[Owner]] = {}
        self._direct: Optional[int] = None
        self._direct_owner: Optional[Owner] = None
        self._direct_there = False
        self._seed: Optional[Seed] = None
        self._nursery: Optional[Nursery] = None
        self._ended_by_us: Set[int] = set()
        self._ending: Set[int] = set()
        self._hunts = 0

    def __contains__(self, pid: object) -> bool:
        """Return whether a child is no orphan: a keeper, the seed, or the nursery."""
        ours = self._nursery.pid if self._nursery is not None else None
        return pid in self._keepers or pid == ours or pid == self._known_seed()

    # Commands

    def has_place_for_direct(self) -> bool:
        """Return whether the next command can be the direct one, and needs no keeper."""
        return self._direct is None and not self._hunts and not self.orphans()

    def add_direct(self, pid: int, owner: Owner) -> None:
        """Add the program of the direct command."""
        self._direct, self._direct_owner, self._direct_there = pid, owner, True

    def add_keeper(self, pid: int, owner: Owner) -> None:
        """Add the keeper of a command."""
        self._keepers[pid] = owner

    def release(self, owner: Owner) -> None:
        """Forget a command that has ended. The processes that it left behind stay in the table."""
        if self._direct_owner is owner:
            self._direct = self._direct_owner = None
        for pid, known in self._keepers.items():
            if known is owner:
                self._keepers[pid] = None

    def orphans(self) -> Set[int]:
        """Return our children that are neither keepers nor the seed nor the nursery."""
        try:
            children = _read(b"/proc/self/task/%d/children" % os.getpid()).split()
        except OSError:  # the kernel lacks that file: to be safe, commands get keepers
            return {0} if self._keepers or self._direct else set()
        return {int(pid) for pid in children if int(pid) not in self}

    # Their ends

    def is_direct(self, pid: int) -> bool:
        return pid == self._direct and self._direct_there

    @property
    def ending(self) -> bool:
        return bool(self._ending)

    def end_direct(self, pid: int) -> bool:
        """Kill it, because it has come to its end: it will be gone soon. False if it is another."""
        if not self.is_direct(pid):
            return False
        os.kill(pid, signal.SIGKILL)
        self._ending.add(pid)
        return True

    @property
    def direct_owner(self) -> Optional[Owner]:
        return self._direct_owner

    def is_keeper(self, pid: int) -> bool:
        return pid in self._keepers

    def remove(self, pid: int) -> Optional[Owner]:
        """It has ended; who it worked for."""
        self._ending.discard(pid)
        if pid == self._direct:
            self._direct_there = False
        if self._nursery is not None and self._nursery.pid == pid:
            self._nursery.has_ended()
            self._known_seed()  # what it still said of it
            self._nursery.close()
            self._nursery = None
        elif self._known_seed() == pid:
            self._forget_seed()
        return self._keepers.pop(pid, None)

    # For killing

    def begin_hunt(self) -> None:
        """Note that processes without a keeper are being killed: no command may start as one."""
        self._hunts += 1

    def end_hunt(self) -> None:
        self._hunts -= 1

    def end_keeper(self, pid: int) -> None:
        """Note that we kill this keeper because its tree has ended."""
        self._ended_by_us.add(pid)

    def was_ended_by_us(self, pid: int) -> bool:
        known = pid in self._ended_by_us
        self._ended_by_us.discard(pid)
        return known

    def alone(self, keeper: Optional[int]) -> bool:
        """Return whether only the command of this keeper lives (None: the direct command)."""
        if any(pid != keeper for pid in self._keepers):
            return False
        return keeper is None or not (self._direct or self.orphans())

    def idle(self) -> List[int]:
        """Return the keepers whose command has ended while some of its processes run."""
        return [pid for pid, owner in self._keepers.items() if owner is None]

    def keepers(self) -> List[int]:
        return list(self._keepers)

    # The seed

    def have_seed(self, likely: Optional[Dict[str, Any]], tells: bool) -> None:
        """Fork one, unless it is there. Best done when nobody waits."""
        if self._seed is None:
            try:
                self._seed = fork_seed(likely, tells)
            except OSError:
                pass  # no process to spare: the next command will say so, if it lasts

    def have_nursery(self, likely: Dict[str, Any]) -> None:
        """For the seeds of a series."""
        if self._nursery is None and can_fork_sibling():
            try:
                self._nursery = Nursery(likely)
            except OSError:
                pass

    def have_seed_of_series(self) -> bool:
        """Have the nursery fork a seed, if there is one. Returns whether there is a seed."""
        if self._seed is None and self._nursery is not None and not self._nursery.closed:
            try:
                self._seed = self._nursery.seed()
            except OSError:
                pass
        return self._seed is not None

    @property
    def has_seed(self) -> bool:
        return self._seed is not None

    def take_seed(self) -> Optional[Seed]:
        if not self._known_seed() or self._seed is None or self._seed.closed:
            return None
        seed, self._seed = self._seed, None
        return seed

    def drop_seed(self) -> None:
        """End the seed and the nursery. They are forgotten when they have ended."""
        if self._known_seed() and self._seed is not None:
            self._seed.end()
        if self._nursery is not None:
            self._nursery.end()

    def _known_seed(self) -> Optional[int]:
        """Return the seed's pid, or None. A seed without a pid is forgotten."""
        if self._seed is None:
            return None
        if not self._seed.pid:
            self._forget_seed()
            return None
        return self._seed.pid

    def _forget_seed(self) -> None:
        assert self._seed is not None
        self._seed.close()
        self._seed = None
