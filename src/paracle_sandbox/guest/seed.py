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
from typing import Any, Dict, Optional, Tuple

from .ends import agree, announce_end
from .kernel import SET_DUMPABLE, close_from, drop_signals, fork, prctl, unblock_signals
from .program import become, become_program, rehearse

# A message must fit into the socket at once, since the guest waits for nobody.
MAX_MESSAGE_BYTES = 64 << 10
# The status of one that came to none.
NO_PROGRAM = 70


class Seed:
    """The guest's side. Raises OSError when it cannot be had.

    ``likely``: the program that will come, as far as it can be guessed, if there is time to go
    through all that it will do.
    ``tells``: whether it will tell of its end (`ends`).
    """

    def __init__(self, likely: Optional[Dict[str, Any]], tells: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        if tells:
            agree()
        try:
            with theirs:
                self.pid = fork()
                if self.pid == 0:
                    become_seed(theirs, likely, tells)
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
                os.kill(self.pid, signal.SIGCONT)  # somebody may have stopped it
                self._socket.sendmsg([message], [rights])
            except OSError:
                return False  # somebody killed it
        return True

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()


def become_seed(guest: socket.socket, likely: Optional[Dict[str, Any]], tells: bool) -> None:
    """Does not return."""
    try:
        signal.set_wakeup_fd(-1)
        os.closerange(3, guest.fileno())
        close_from(guest.fileno() + 1)
        settle()
        if tells:
            announce_end()
        if likely is not None:
            rehearse(likely)
            _warm_up()
        become(lambda: _receive(guest))
    finally:
        os._exit(NO_PROGRAM)


def _receive(guest: socket.socket) -> Dict[str, Any]:
    """Wait for the program, and take what it comes with."""
    message, ancillary, _, _ = guest.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 3))
    if not message:
        os._exit(0)  # nobody wants us any more
    received = array.array("i")
    received.frombytes(ancillary[0][2])
    for number, source in enumerate(received):
        os.dup2(source, number)
    guest.detach()  # closed below: what has its number then is not ours to close
    program, cwd, terminal = marshal.loads(message)  # noqa: S302  from the guest itself
    os.chdir(cwd)
    drop_signals()  # sent to whoever was there, not to the program
    take_over(terminal)
    return program  # type: ignore[no-any-return]


def settle() -> None:
    """What a program's process has, whatever the program: a session of its own."""
    os.setsid()


def grow(program: Dict[str, Any], terminal: bool) -> None:
    """Become the program: its descriptors and directory are there. Does not return."""
    take_over(terminal)
    become_program(program)


def take_over(terminal: bool) -> None:
    """Be the program's process: nothing of ours is left but what runs it."""
    close_from(3)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    prctl(SET_DUMPABLE, 1)
    unblock_signals()


def _warm_up() -> None:
    """Write to the pages that nearly every program will write to, too."""
    scope: Dict[str, Any] = {}
    exec(compile("def f(x):\n    return '%s' % [x]\nf(1)\n", "warm", "exec"), scope)  # noqa: S102
    with io.StringIO() as text:
        print("x", file=text, flush=True)
    try:
        os.stat("/nonexistent")
    except OSError:
        pass
