"""A Python program forked ahead of need.

It is a process that has everything but its program: session, place in the tree, and its own
copies of the memory pages that every Python program writes to, which is most of what a fork of
Python costs. It waits for one message: the program, its directory and its descriptors.
"""

import array
import fcntl
import io
import marshal
import os
import signal
import socket
import termios
from typing import Any, Dict, Tuple

from .kernel import SET_DUMPABLE, close_from, prctl, unblock_signals
from .program import become_program

GUEST_FD = 3  # on the seed's side
# A message must fit into the socket at once, since the guest waits for nobody.
MAX_MESSAGE_BYTES = 64 << 10


class Seed:
    """The guest's side. Raises OSError when it cannot be had."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            with theirs:
                self.pid = os.fork()
                if self.pid == 0:
                    _become_seed(theirs.fileno())
        except OSError:
            self._socket.close()
            raise

    def start(
        self, program: Dict[str, Any], cwd: bytes, terminal: bool, stdio: Tuple[int, int, int]
    ) -> bool:
        """Hand over the program; False when that cannot be done. The seed is used up."""
        message = marshal.dumps((program, cwd, terminal))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", stdio))
        with self._socket:
            if len(message) > MAX_MESSAGE_BYTES:
                return False
            try:
                self._socket.sendmsg([message], [rights])
            except OSError:
                return False  # somebody killed it
        return True

    def close(self) -> None:
        self._socket.close()


def _become_seed(fd: int) -> None:
    """Does not return."""
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(fd, GUEST_FD, inheritable=False)
        close_from(GUEST_FD + 1)
        settle()
        _warm_up()
        guest = socket.socket(fileno=GUEST_FD)
        message, ancillary, _, _ = guest.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 3))
        if message:
            received = array.array("i")
            received.frombytes(ancillary[0][2])
            for number, source in enumerate(received):
                os.dup2(source, number)
            guest.detach()
            program, cwd, terminal = marshal.loads(message)  # noqa: S302  from the guest itself
            os.chdir(cwd)
            grow(program, terminal)
    finally:
        os._exit(70)


def settle() -> None:
    """What a program's process has, whatever the program: a session of its own."""
    os.setsid()


def grow(program: Dict[str, Any], terminal: bool) -> None:
    """Become the program: its descriptors and directory are there. Does not return."""
    close_from(3)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    prctl(SET_DUMPABLE, 1)
    unblock_signals()
    become_program(program)


def _warm_up() -> None:
    """Write to the pages that a program will write to, before anybody waits for it."""
    scope: Dict[str, Any] = {}
    exec(compile("def f(x):\n    return '%s' % [x]\nf(1)\n", "warm", "exec"), scope)  # noqa: S102
    with open("/dev/null", "rb") as file:
        io.TextIOWrapper(io.BufferedReader(io.FileIO(file.fileno(), closefd=False)), "utf-8").read()
    with io.StringIO() as text:
        print("x", file=text, flush=True)
    environment = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    for number in signal.valid_signals():
        signal.getsignal(number)
    try:
        os.stat("/nonexistent")
    except OSError:
        pass
