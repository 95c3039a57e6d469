"""Fork preforked programs where they follow each other at once.

Each fork makes the guest copy its pages anew, as it writes to them, and each program goes the same
way from there to where it waits for its program. So in a series the guest forks once: a process
that goes that way to its end, and stays there. Its forks are children of the guest like others,
and start from where it stands.
"""

import os
import select
import signal
import socket
import struct
from typing import Any, Dict

from ..clone import fork_sibling
from ..kernel import end_child, fork
from ..python.program import become, ready_for, rehearse
from .preforked import NO_PROGRAM, Preforked, receive, settle, shed, warm_up

# For so long the guest waits at most to hear of a fork: somebody may have stopped us, or there is
# little of the processor to be had.
_ANSWER_SECONDS = 0.25
_MAX_ANSWER_BYTES = 16
_NOBODY = -1
_LINE = struct.Struct("i")
_RIGHTS_BYTES = socket.CMSG_SPACE(_LINE.size)


class ForkServer:
    """The guest's side. Raises OSError when it cannot be had.

    ``likely``: as for `fork_program`.
    """

    def __init__(self, likely: Dict[str, Any]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = ready_for()
        try:
            with theirs:
                self.pid = fork()
                if self.pid == 0:
                    _become_fork_server(theirs, likely)
        except OSError:
            self._socket.close()
            raise

    def fork(self) -> Preforked:
        """One that will be there when it is asked for its number. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _LINE.pack(theirs.fileno()))
        try:
            with theirs:
                self._socket.sendmsg([b"x"], [rights], socket.MSG_DONTWAIT)
        except OSError:
            ours.close()
            raise
        return Preforked(ours, self._answer, self._ready)

    def _answer(self) -> int:
        """The pid of the fork that was asked for last; 0 if there is none."""
        if self.closed:
            return 0
        news = select.poll()
        news.register(self._socket, select.POLLIN)
        try:
            if not news.poll(0) and self.pid:
                os.kill(self.pid, signal.SIGCONT)
                news.poll(1000 * _ANSWER_SECONDS)
            answer = int(self._socket.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT) or _NOBODY)
        except OSError:
            answer = _NOBODY
        if answer == _NOBODY:  # it is gone, or cannot fork, or whatever it still does is too late
            self.end()
            return 0
        return answer

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()

    def end(self) -> None:
        self.close()
        if self.pid:
            end_child(self.pid)

    def has_ended(self) -> None:
        """Its number may be another's from now on."""
        self.pid = 0


def _become_fork_server(guest: socket.socket, likely: Dict[str, Any]) -> None:
    """Does not return."""
    try:
        shed(guest)
        settle()
        rehearse(likely)
        warm_up()
        become(lambda: receive(_fork_when_told(guest, guest.fileno())))
    finally:
        os._exit(NO_PROGRAM)


def _fork_when_told(guest: socket.socket, line: int) -> socket.socket:
    """Returns in the forks, each with its own line to the guest in place of ours."""
    while True:
        message, ancillary, _, _ = guest.recvmsg(1, _RIGHTS_BYTES)
        if not message:
            os._exit(0)  # nobody wants us any more
        (given,) = _LINE.unpack(ancillary[0][2])
        try:
            pid = fork_sibling()
        except OSError:
            pid = _NOBODY
        if pid == 0:
            break
        os.close(given)
        guest.send(b"%d" % pid)
    os.dup2(given, line)
    os.close(given)
    settle()
    return guest
