"""The keeper: the process between the guest and a command that runs beside another one.

    guest ── keeper ── program ── its descendants
      ^        |
      └─status─┘  a pipe that only the keeper holds

The guest forks the keeper, and the keeper starts the program. It reports the program's pid and
later its wait status to the guest. Then it stays, as the reaper of the processes that the program
left behind, until all of them have ended. It is a child subreaper and so the parent of every orphan
below it: the trees of two commands never mix. It blocks every signal that can be blocked and is not
dumpable. If it is killed all the same, its pipe ends without a status, which tells the guest.
"""

import os
import signal
import struct
from typing import Tuple

from ..kernel import SET_CHILD_SUBREAPER, close_from, prctl
from ..request import Launch
from .oom import NO_CHANGE, OomFirst
from .spawn import Refused, start_program

# A report of the keeper: one tag and one number.
NEWS = struct.Struct("<ci")
STARTED = b"p"  # pid of the program
ENDED = b"s"  # its wait status
STATUS_FD = 3
Fds = Tuple[int, int, int, int]  # the program's stdin, stdout, stderr; the keeper's status pipe


def start_keeper(launch: Launch, fds: Fds, oom: OomFirst) -> int:
    """Fork a keeper and return its pid. The descriptors must all be above 3."""
    # The keeper inherits the score and passes it on. To set it itself, it would have to be
    # dumpable for a moment, and open to other programs of the sandbox.
    with oom:
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # The guest's handler for SIGCHLD would write to a descriptor that is another file here.
        # All other signals are blocked, as in the guest.
        signal.set_wakeup_fd(-1)
        prctl(SET_CHILD_SUBREAPER, 1)
        _keep(launch, fds)
        code = 0
    finally:
        os._exit(code)  # an exception must not return into the guest's loop


def _keep(launch: Launch, fds: Fds) -> None:
    """Be the keeper of one command. This closes every descriptor that it was not given."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number, inheritable=number != STATUS_FD)
    close_from(STATUS_FD + 1)
    pid = _start(launch)
    os.closerange(0, STATUS_FD)
    close_from(STATUS_FD + 1)
    os.chdir("/")
    if pid:
        _say(STARTED, pid)
        _reap_all(pid)


def _start(launch: Launch) -> int:
    """Start the program and return its pid; 0 if it failed, after a report to the guest."""
    try:
        return start_program(launch, (0, 1, 2), None, NO_CHANGE)
    except Refused as refused:
        _say(refused.tag, refused.code)
        return 0


def _reap_all(program: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if pid == program:
            _say(ENDED, status)
            os.close(STATUS_FD)


def _say(tag: bytes, value: int) -> None:
    os.write(STATUS_FD, NEWS.pack(tag, value))
