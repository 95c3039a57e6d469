"""The living keepers, and one forked ahead of need.

Forking and settling in is half of what a small command costs, and none of it depends on the
command. A spare has done it, and waits for one message: what to start, and the descriptors.
"""

import array
import marshal
import os
import socket
from typing import Dict, Generic, List, Optional, TypeVar

from .keeper import STATUS_FD, Fds, fork_into, keep, start_keeper
from .kernel import close_from
from .launch import Launch
from .seed import Seed

Owner = TypeVar("Owner")

# Larger ones are left to a fresh fork: a message must fit into the socket at once, since the
# guest waits for nobody.
MAX_MESSAGE_BYTES = 64 << 10


class Keepers(Generic[Owner]):
    """Who each keeper works for; nobody, when it is a spare or its command has ended."""

    def __init__(self) -> None:
        self._owners: Dict[int, Optional[Owner]] = {}
        self._spare: Optional[Spare] = None
        self._started = 0
        self._last_was_python = False

    def __contains__(self, pid: object) -> bool:
        return pid in self._owners

    def alone(self, pid: Optional[int]) -> bool:
        """Whether no other keeper has anything to keep."""
        spare = self._spare.pid if self._spare is not None else None
        return all(other in (pid, spare) for other in self._owners)

    def idle(self) -> List[int]:
        """Keepers whose command has ended, but not what it started."""
        spare = self._spare.pid if self._spare is not None else None
        return [pid for pid, owner in self._owners.items() if owner is None and pid != spare]

    def start(self, launch: Launch, fds: Fds, owner: Owner) -> int:
        """The pid of a keeper for this command. Raises OSError."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.start(launch, fds):
            pid = spare.pid
        else:
            pid = start_keeper(launch, fds)
        self._owners[pid] = owner
        self._started += 1
        self._last_was_python = launch.program is not None
        return pid

    def refill(self) -> None:
        """Have a spare, unless the sandbox was made for a single command."""
        if self._started < 2 or self._spare is not None:
            return
        try:
            self._spare = Spare(with_seed=self._last_was_python)
        except OSError:
            return  # no process to spare: the next command will say so, if it lasts
        self._owners[self._spare.pid] = None

    def release(self, pid: int) -> None:
        if pid in self._owners:
            self._owners[pid] = None

    def remove(self, pid: int) -> Optional[Owner]:
        """It has ended; who it worked for."""
        if self._spare is not None and self._spare.pid == pid:
            self._spare = None
        return self._owners.pop(pid, None)


class Spare:
    """One waiting keeper; raises OSError when it cannot be had."""

    def __init__(self, with_seed: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self.pid = fork_into(lambda: _wait(theirs.fileno(), with_seed))
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def start(self, launch: Launch, fds: Fds) -> bool:
        """Hand over the command; False when that cannot be done. The spare is used up."""
        message = marshal.dumps(tuple(launch._replace(terminal_size=None)))
        with self._socket:
            if len(message) > MAX_MESSAGE_BYTES:
                return False
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            try:
                self._socket.sendmsg([message], [rights])
            except OSError:
                return False  # a program has killed it
        return True


def _wait(fd: int, with_seed: bool) -> None:
    os.dup2(fd, STATUS_FD, inheritable=False)
    close_from(STATUS_FD + 1)
    seed = Seed() if with_seed else None
    guest = socket.socket(fileno=STATUS_FD)
    message, ancillary, _, _ = guest.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4))
    if not message:
        return  # not needed any more
    received = array.array("i")
    received.frombytes(ancillary[0][2])
    guest.detach()
    launch = Launch(*marshal.loads(message))  # noqa: S302  from the guest itself
    keep(launch, (received[0], received[1], received[2], received[3]), seed)
