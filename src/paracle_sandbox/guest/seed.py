"""A Python program forked ahead of need, by a spare keeper.

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

OOM_FIRST = b"1000"
SEED_FD = 4
KEEPER_FD = 3  # on the other side
MAX_MESSAGE_BYTES = 64 << 10


class Seed:
    """The keeper's side. Its socket is SEED_FD, which nothing else may use."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = os.fork()
            if self.pid == 0:
                become_seed(theirs.fileno())
        fd = ours.detach()
        if fd != SEED_FD:
            os.dup2(fd, SEED_FD, inheritable=False)
            os.close(fd)

    def start(self, program: Dict[str, Any], cwd: bytes, terminal: bool) -> bool:
        """Hand over our standard streams and the program; False when that cannot be done."""
        message = marshal.dumps((program, cwd, terminal))
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (0, 1, 2)))
        with socket.socket(fileno=SEED_FD) as seed:
            try:
                seed.sendmsg([message], [rights])
            except OSError:
                return False  # somebody killed it, or the message is too long
        return True


def become_seed(fd: int) -> None:
    """Does not return."""
    try:
        os.dup2(fd, KEEPER_FD, inheritable=False)
        close_from(KEEPER_FD + 1)
        settle()
        _warm_up()
        keeper = socket.socket(fileno=KEEPER_FD)
        message, ancillary, _, _ = keeper.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 3))
        if message:
            received = array.array("i")
            received.frombytes(ancillary[0][2])
            for number, source in enumerate(received):
                os.dup2(source, number)
            keeper.detach()
            program, cwd, terminal = _decode(message)
            os.chdir(cwd)
            grow(program, terminal)
    finally:
        os._exit(70)


def _decode(message: bytes) -> Tuple[Dict[str, Any], bytes, bool]:
    program, cwd, terminal = marshal.loads(message)  # noqa: S302  from the keeper
    return program, cwd, terminal


def settle() -> None:
    """What a program's process has, whatever the program."""
    os.setsid()
    prctl(SET_DUMPABLE, 1)
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, OOM_FIRST)
        finally:
            os.close(fd)
    except OSError:
        pass  # a preference, not a protection
    prctl(SET_DUMPABLE, 0)


def grow(program: Dict[str, Any], terminal: bool) -> None:
    """Become the program: its descriptors and directory are there. Does not return."""
    close_from(3)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    prctl(SET_DUMPABLE, 1)
    unblock_signals()
    become_program(program)


def _warm_up() -> None:
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
