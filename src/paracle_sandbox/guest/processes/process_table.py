"""The table of the guest's children: by it, every process belongs to exactly one command.

    guest ── program ── its descendants         the direct command: no process between
          ├─ keeper ── program ── ...           every further command that runs beside it
          ├─ preforked                          a Python forked ahead of need
          └─ fork server                        forks those in a series

The kernel gives orphans to their nearest subreaper. Each keeper is one, and so is the guest. So a
process with a keeper above it belongs to that keeper's command, and every other process below the
guest belongs to the direct command. There is one direct command at a time. It counts until the last
process that it left behind has ended; a command that starts meanwhile has a keeper.
"""

import os
from typing import Any, Dict, Generic, List, Optional, Set, TypeVar

from ..clone import main_thread
from ..prefork.fork_server import ForkServer
from ..prefork.preforked import Preforked, fork_program

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
        self._preforked: Optional[Preforked] = None
        self._fork_server: Optional[ForkServer] = None
        self._ended_by_us: Set[int] = set()
        self._hunts = 0

    def __contains__(self, pid: object) -> bool:
        """Return whether a child is no orphan: a keeper, the preforked process, or the fork
        server."""
        ours = self._fork_server.pid if self._fork_server is not None else None
        return pid in self._keepers or pid == ours or pid == self._known_preforked()

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
        """Return our children that are neither keepers nor the preforked process nor the fork
        server."""
        try:
            children = _read(b"/proc/self/task/%d/children" % os.getpid()).split()
        except OSError:  # the kernel lacks that file: to be safe, commands get keepers
            return {0} if self._keepers or self._direct else set()
        return {int(pid) for pid in children if int(pid) not in self}

    # Their ends

    def is_direct(self, pid: int) -> bool:
        return pid == self._direct and self._direct_there

    @property
    def direct_owner(self) -> Optional[Owner]:
        return self._direct_owner

    def is_keeper(self, pid: int) -> bool:
        return pid in self._keepers

    def remove(self, pid: int) -> Optional[Owner]:
        """It has ended; who it worked for."""
        if pid == self._direct:
            self._direct_there = False
        if self._fork_server is not None and self._fork_server.pid == pid:
            self._fork_server.has_ended()
            self._known_preforked()  # what it still said of it
            self._fork_server.close()
            self._fork_server = None
        elif self._known_preforked() == pid:
            self._forget_preforked()
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

    # The preforked program

    def prefork(self, likely: Optional[Dict[str, Any]]) -> None:
        """Fork one, unless it is there. Best done when nobody waits."""
        if self._preforked is None:
            try:
                self._preforked = fork_program(likely)
            except OSError:
                pass  # no process to spare: the next command will say so, if it lasts

    def have_fork_server(self, likely: Dict[str, Any]) -> None:
        """Fork it, unless it is there."""
        if self._fork_server is None and main_thread() is not None:
            try:
                self._fork_server = ForkServer(likely)
            except OSError:
                pass

    def prefork_in_series(self) -> bool:
        """Have the fork server fork a preforked process, if there is one. Returns whether there is
        a preforked process."""
        server = self._fork_server
        if self._preforked is None and server is not None and not server.closed:
            try:
                self._preforked = server.fork()
            except OSError:
                pass
        return self._preforked is not None

    @property
    def has_preforked(self) -> bool:
        return self._preforked is not None

    def take_preforked(self) -> Optional[Preforked]:
        if not self._known_preforked() or self._preforked is None or self._preforked.closed:
            return None
        taken, self._preforked = self._preforked, None
        return taken

    def drop_preforked(self) -> None:
        """End the preforked process and the fork server. They are forgotten when they have
        ended."""
        if self._known_preforked() and self._preforked is not None:
            self._preforked.end()
        if self._fork_server is not None:
            self._fork_server.end()

    def _known_preforked(self) -> Optional[int]:
        """Return the preforked process's pid, or None. A preforked process without a pid is
        forgotten."""
        if self._preforked is None:
            return None
        if not self._preforked.pid:
            self._forget_preforked()
            return None
        return self._preforked.pid

    def _forget_preforked(self) -> None:
        assert self._preforked is not None
        self._preforked.close()
        self._preforked = None
