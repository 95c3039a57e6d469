"""A Python program forked ahead of need.

It is a process that has everything but its program: session, place in the tree, and its own
copies of the memory pages that every Python program writes to, which is most of what a fork of
Python costs. It waits for one message: the program, its directory and its descriptors.
"""

import _socket
import fcntl
import io
import marshal
import os
import signal
import socket
import struct
import termios
from typing import Any, Callable, Dict, Optional, Tuple

from ..kernel import SET_DUMPABLE, close_from, drop_signals, end_child, fork, prctl, unblock_signals
from ..python.program import become, become_program, main_module, ready_for, rehearse

# A message must fit into the socket at once, since the guest waits for nobody.
MAX_MESSAGE_BYTES = 64 << 10
# Made here, for forks to write only to as much of it as they get.
_message = bytearray(MAX_MESSAGE_BYTES)
_STDIO = struct.Struct("3i")
_RIGHTS_BYTES = socket.CMSG_SPACE(_STDIO.size)
# The status of one that came to none.
NO_PROGRAM = 70


def fork_program(likely: Optional[Dict[str, Any]]) -> "Preforked":
    """Raises OSError when it cannot be had.

    ``likely``: the program that will come, as far as it can be guessed, if there is time to go
    through all that it will do.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            pid = fork()
            if pid == 0:
                become_preforked(theirs, likely)
    except OSError:
        ours.close()
        raise
    return Preforked(ours, lambda: pid, ready_for())


class Preforked:
    """The guest's side.

    ``find_pid``: asked once, when it has to be known.
    ``ready``: what of a program it has already.
    """

    def __init__(
        self, ours: socket.socket, find_pid: Callable[[], int], ready: Dict[str, Any]
    ) -> None:
        self._socket = ours
        self._ready = ready
        self._socket.setblocking(False)
        self._find_pid = find_pid
        self._pid: Optional[int] = None
        self._took: Optional[bool] = None

    @property
    def pid(self) -> int:
        """0 if there was none to be had."""
        if self._pid is None:
            self._pid = self._find_pid()
        return self._pid

    def start(
        self, program: Dict[str, Any], cwd: bytes, terminal: bool, stdio: Tuple[int, int, int]
    ) -> bool:
        """Hand over the program; False when that cannot be done. It is used up; what is left
        to ask it is whether it `took` the program."""
        told = {
            name: value
            for name, value in program.items()
            if name not in self._ready or self._ready[name] != value
        }
        message = marshal.dumps((told, cwd, terminal))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _STDIO.pack(*stdio))
        try:
            if len(message) <= MAX_MESSAGE_BYTES and self.pid:
                os.kill(self.pid, signal.SIGCONT)  # somebody may have stopped it
                self._socket.sendmsg([message], [rights])
                return True
        except OSError:
            pass  # somebody killed it
        self.close()
        return False

    @property
    def took(self) -> Optional[bool]:
        """The program that it was handed: False when it died before, though we could not know. None
        as long as it may still do either."""
        if self._took is None:
            try:
                self._socket.recv(1)
                self._took = True
            except BlockingIOError:
                pass
            except OSError:
                self._took = False  # it ended with a message unread, which is said only once
        return self._took

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Whoever is at the other end, known to us or not, ends by itself."""
        self._socket.close()

    def end(self) -> None:
        """Whether it was stopped or not. It must not be known to have ended: its number may be
        another's then."""
        self.close()
        if self.pid:
            end_child(self.pid)


def become_preforked(guest: socket.socket, likely: Optional[Dict[str, Any]]) -> None:
    """Does not return."""
    try:
        shed(guest)
        settle()
        if likely is not None:
            rehearse(likely)
            warm_up()
        become(lambda: receive(guest))
    finally:
        os._exit(NO_PROGRAM)


def shed(guest: socket.socket) -> None:
    """Be the guest no more: its descriptors are closed, but for a line to it."""
    signal.set_wakeup_fd(-1)
    os.closerange(3, guest.fileno())
    close_from(guest.fileno() + 1)


def receive(guest: socket.socket) -> Dict[str, Any]:
    """Wait for the program, and take what it comes with."""
    size, ancillary, _, _ = guest.recvmsg_into([_message], _RIGHTS_BYTES)
    if not size:
        os._exit(0)  # nobody wants us any more
    for number, given in enumerate(_STDIO.unpack(ancillary[0][2])):
        os.dup2(given, number)
    # Closed below: what has its number then is not ours to close. Not the method that Python has
    # around this one: each page that it would write to is copied first.
    _socket.socket.detach(guest)
    told, cwd, terminal = marshal.loads(_message)  # noqa: S302  from the guest itself
    program = {**ready_for(), **told}
    os.chdir(cwd)
    drop_signals()  # sent to whoever was there, not to the program
    take_over(terminal)
    return program


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


def warm_up() -> None:
    """Write to the pages that nearly every program will write to, too."""
    scope: Dict[str, Any] = {}
    exec(compile("def f(x):\n    return '%s' % [x]\nf(1)\n", "warm", "exec"), scope)  # noqa: S102
    with io.StringIO() as text:
        print("x", file=text, flush=True)
    try:
        os.stat("/nonexistent")
    except OSError:
        pass
    # What leads to a program, as far as doing it once more changes nothing.
    _message[:1] = b"x"
    enumerate(_STDIO.unpack(bytes(_STDIO.size)))
    ready_for()
    drop_signals()
    prctl(SET_DUMPABLE, 0)
    main_module("warm")
