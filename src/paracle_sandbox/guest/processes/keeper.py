"""The keeper: the process between the guest and a command that runs beside another.

    guest ── keeper ── program ── whatever it starts
      ^        |
      └─status─┘  a pipe that only the keeper holds

The guest forks the keeper, the keeper starts the program, tells the guest its pid and later
its wait status, and stays as the reaper of what the program left behind until nothing is left.
As a child subreaper it is the parent of every orphan below it, so a tree never mixes with
another command's. It blocks every signal that can be blocked and is not dumpable; killed all
the same, its pipe ends without a status and the guest knows.
"""

import os
import signal
import struct
from typing import Tuple

from ..kernel import SET_CHILD_SUBREAPER, close_from, prctl
from ..request import Launch
from .oom import NO_CHANGE, OomFirst
from .spawn import Refused, start_program

# What the keeper says: one tag and one number.
NEWS = struct.Struct("<ci")
STARTED = b"p"  # pid of the program
ENDED = b"s"  # its wait status
STATUS_FD = 3
Fds = Tuple[int, int, int, int]  # the program's stdin, stdout, stderr; the keeper's status pipe


def start_keeper(launch: Launch, fds: Fds, oom: OomFirst) -> int:
    """Fork a keeper; its pid. The descriptors are all above 3."""
    # The score is inherited through us: taking it on ourselves would mean to be dumpable for a
    # moment, and open to other programs of the sandbox.
    with oom:
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # The guest's handler for SIGCHLD would write to a descriptor that is something else
        # here. All other signals are blocked, as in the guest.
        signal.set_wakeup_fd(-1)
        prctl(SET_CHILD_SUBREAPER, 1)
        _keep(launch, fds)
        code = 0
    finally:
        os._exit(code)  # whatever was raised: never back into the guest's loop


def _keep(launch: Launch, fds: Fds) -> None:
    """Be the keeper of one command. Closes every descriptor it was not given."""
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
    """The pid of the program, or 0 after telling the guest what failed."""
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
