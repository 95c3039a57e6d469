"""The keeper: the process between the guest and one command.

    guest ── keeper ── program ── whatever it starts
      ^        |
      └─status─┘  a pipe that only the keeper holds

The guest forks the keeper, the keeper starts the program, tells the guest its pid and later
its wait status, and stays as the reaper of what the program left behind until nothing is left.
As a child subreaper it is the parent of every orphan below it, so a tree never mixes with
another command's. It blocks every signal that can be blocked and is not dumpable; killed all
the same, its pipe ends without a status and the guest knows. Programs are started by
posix_spawn, which does not copy the page tables of the guest as fork would (0.6 ms less).
"""

import errno
import os
import resource
import signal
import struct
from typing import Any, Callable, Dict, List, Optional, Tuple

from .kernel import SET_CHILD_SUBREAPER, SET_DUMPABLE, close_from, prctl
from .launch import Launch
from .seed import OOM_FIRST, SEED_FD, Seed, grow, settle

# What the keeper says: one tag and one number.
NEWS = struct.Struct("<ci")
STARTED = b"p"  # pid of the program
ENDED = b"s"  # its wait status
BAD_SOURCE = b"w"  # errno of writing the source
BAD_DIRECTORY = b"c"  # errno of entering the working directory
BAD_PROGRAM = b"x"  # errno of executing the program

STATUS_FD = 3
Fds = Tuple[int, int, int, int]  # the program's stdin, stdout, stderr; the keeper's status pipe


def start_keeper(launch: Launch, fds: Fds) -> int:
    """Fork a keeper; its pid. The descriptors are all above 3."""
    return fork_into(lambda: keep(launch, fds))


def fork_into(work: Callable[[], None]) -> int:
    """Fork a child of the guest that does the work and ends; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # The guest's handler for SIGCHLD would write to a descriptor that is something else
        # here. All other signals are blocked, as in the guest.
        signal.set_wakeup_fd(-1)
        prctl(SET_CHILD_SUBREAPER, 1)
        for limit in (resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
            resource.setrlimit(limit, (0, 0))
        work()
        code = 0
    finally:
        os._exit(code)  # whatever was raised: never back into the guest's loop


def keep(launch: Launch, fds: Fds, seed: Optional[Seed] = None) -> None:
    """Be the keeper of one command. Closes every descriptor it was not given."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number, inheritable=number != STATUS_FD)
    close_from(SEED_FD + 1 if seed else SEED_FD)
    pid = _start(launch, seed)
    os.closerange(0, STATUS_FD)
    close_from(STATUS_FD + 1)
    os.chdir("/")
    if pid:
        _say(STARTED, pid)
        _reap_all(pid)


def _start(launch: Launch, seed: Optional[Seed]) -> int:
    """The pid of the program, or 0 after telling the guest what failed."""
    step = BAD_SOURCE
    try:
        if launch.source:
            write_source(*launch.source)
        step = BAD_DIRECTORY
        os.chdir(launch.cwd)
        step = BAD_PROGRAM
        if launch.program:
            return _fork(launch, launch.program, seed)
        return _spawn(launch)
    except OSError as error:
        _say(step, error.errno or errno.EIO)
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


def write_source(path: bytes, text: bytes) -> None:
    """Put the text at the path, replacing whatever may be there, links and pipes included."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = b"%s.%d" % (path, os.getpid())
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(text)
        while view:
            view = view[os.write(fd, view) :]
        os.rename(draft, path)
    except OSError:
        os.unlink(draft)
        raise
    finally:
        os.close(fd)


def _spawn(launch: Launch) -> int:
    """Execute a program; raises OSError with the errno of execve."""
    actions: List[Tuple[Any, ...]] = []
    if launch.terminal:
        # The first terminal that a new session opens becomes its controlling terminal.
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, launch.terminal, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]
    refusal = errno.ENOENT
    with _OomFirst():
        for path in candidates(launch.argv[0], launch.env):
            try:
                return os.posix_spawn(
                    path,
                    launch.argv,
                    launch.env,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
                )
            except (FileNotFoundError, NotADirectoryError):
                pass
            except PermissionError as error:
                refusal = error.errno or errno.EACCES  # the next in PATH may be a better one
    raise OSError(refusal, os.strerror(refusal))


def candidates(name: bytes, env: Dict[bytes, bytes]) -> List[bytes]:
    """The paths to try, in order, as execvp does with the PATH of the program."""
    if b"/" in name:
        return [name]
    paths = [
        os.path.join(folder or b".", name)
        for folder in env.get(b"PATH", os.defpath.encode()).split(b":")
    ]
    # A failed spawn costs a process: leave out what is not there.
    return [path for path in paths if os.path.lexists(path)] if name else []


class _OomFirst:
    """While active, what we start is the kernel's first choice when memory runs out.

    The keeper takes the score on for the moment of the spawn, because the child inherits it.
    Its own file in /proc is closed to it unless it is dumpable.
    """

    def __enter__(self) -> None:
        prctl(SET_DUMPABLE, 1)
        try:
            self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        prctl(SET_DUMPABLE, 0)
        self._before = os.read(self._fd, 16) if self._fd >= 0 else b""
        self._write(OOM_FIRST)

    def __exit__(self, *_: object) -> None:
        self._write(self._before)
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self, score: bytes) -> None:
        try:
            os.pwrite(self._fd, score, 0)
        except OSError:
            pass  # a preference, not a protection


def _fork(launch: Launch, program: Dict[str, Any], seed: Optional[Seed]) -> int:
    """Start Python by becoming it."""
    if seed and seed.start(program, launch.cwd, bool(launch.terminal)):
        return seed.pid
    pid = os.fork()
    if pid:
        return pid
    try:
        settle()
        grow(program, bool(launch.terminal))
    finally:
        os._exit(70)
