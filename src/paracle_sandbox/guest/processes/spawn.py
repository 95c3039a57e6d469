"""Start a program as a child of the guest or of a keeper.

Programs are executed by posix_spawn, which copies no page tables; Python programs are forks of
the guest, or preforked. Their descriptors, directory and oom score are put in place around
that, in the parent or in the child.
"""

import errno
import fcntl
import os
import signal
import termios
from typing import Any, Dict, List, Optional, Tuple

from ..kernel import close_from, fork, unblock_signals
from ..prefork.preforked import Preforked, grow, settle
from ..python.program import shadowed
from ..request import Launch
from .oom import OomFirst

# The step that failed. A keeper reports it to the guest by these letters.
BAD_SOURCE = b"w"  # errno of writing the source
BAD_DIRECTORY = b"c"  # errno of entering the working directory
BAD_PROGRAM = b"x"  # errno of executing the program

Stdio = Tuple[int, int, int]


class Refused(Exception):
    """The program cannot be started. It says which step failed, and its errno."""

    def __init__(self, tag: bytes, code: int) -> None:
        super().__init__(tag, code)
        self.tag = tag
        self.code = code


def refusal(name: bytes, code: int) -> Tuple[bytes, int]:
    """Return the line and the exit code with which a shell reports that a program cannot run."""
    reason = "command not found" if code == errno.ENOENT else os.strerror(code)
    line = b"paracle: %s: %s\n" % (name, reason.encode())
    return line, 127 if code == errno.ENOENT else 126


def start_program(launch: Launch, stdio: Stdio, ready: Optional[Preforked], oom: OomFirst) -> int:
    """Start a program and return its pid. Raises Refused."""
    tag = BAD_SOURCE
    try:
        if launch.source:
            write_source(*launch.source)
        tag = BAD_DIRECTORY
        os.chdir(launch.cwd)
        tag = BAD_PROGRAM
        if launch.program:
            # Done in the parent, in the program's directory: the fork would copy what it reads.
            launch.program["shadowed"] = shadowed(launch.program)
            if ready and ready.start(launch.program, launch.cwd, bool(launch.terminal), stdio):
                return ready.pid
            with oom:
                return _fork(launch, stdio)
        with oom:
            if launch.terminal and launch.simple_terminals:
                return _spawn_in_terminal(launch, launch.terminal)
            return _spawn(launch, stdio)
    except OSError as error:
        raise Refused(tag, error.errno or errno.EIO) from None
    finally:
        os.chdir("/")


def _spawn(launch: Launch, stdio: Stdio) -> int:
    """Execute a program in a session of its own; raises OSError with the errno of execve."""
    if launch.terminal:
        # The first terminal that a new session opens becomes its controlling terminal.
        actions: List[Tuple[Any, ...]] = [
            (os.POSIX_SPAWN_OPEN, 0, launch.terminal, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]
    else:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)]
    refusal = errno.ENOENT
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
            refusal = error.errno or errno.EACCES  # a later folder of PATH may have another one
    raise OSError(refusal, os.strerror(refusal))


def _spawn_in_terminal(launch: Launch, terminal: bytes) -> int:
    """Do the same as _spawn on a kernel where opening a terminal does not make it controlling."""
    news, ours = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        code = errno.ENOENT
        try:
            signal.set_wakeup_fd(-1)
            settle()
            slave = os.open(terminal, os.O_RDWR)
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for number in (0, 1, 2):
                os.dup2(slave, number)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            unblock_signals()
            for path in candidates(launch.argv[0], launch.env):
                try:
                    os.execve(path, launch.argv, launch.env)  # noqa: S606
                except (FileNotFoundError, NotADirectoryError):
                    pass
                except PermissionError as error:
                    code = error.errno or errno.EACCES
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os.write(ours, bytes([code]))
            os._exit(127)
    os.close(ours)
    refusal = os.read(news, 1)
    os.close(news)
    if refusal:
        os.waitpid(pid, 0)
        raise OSError(refusal[0], os.strerror(refusal[0]))
    return pid


def _fork(launch: Launch, stdio: Stdio) -> int:
    assert launch.program
    pid = fork()
    if pid:
        return pid
    try:
        # The guest's handler for SIGCHLD would write to a descriptor that is another file here.
        signal.set_wakeup_fd(-1)
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        close_from(3)
        settle()
        grow(launch.program, bool(launch.terminal))
    finally:
        os._exit(70)  # an exception must not return into the guest's loop


def write_source(path: bytes, text: bytes) -> None:
    """Write a program's source to the path. A file, link or pipe that is there is replaced."""
    try:
        os.mkdir(os.path.dirname(path))
    except OSError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    draft = path
    try:
        fd = os.open(draft, flags, 0o644)
    except FileExistsError:
        draft = b"%s.%d" % (path, os.getpid())
        fd = os.open(draft, flags, 0o644)
    try:
        view = memoryview(text)
        while view:
            view = view[os.write(fd, view) :]
        if draft != path:
            os.rename(draft, path)
    except OSError:
        try:
            os.unlink(draft)
        except OSError:
            pass  # the error to report is why it could not be written
        raise
    finally:
        os.close(fd)


def candidates(name: bytes, env: Dict[bytes, bytes]) -> List[bytes]:
    """Return the paths to try, in order, as execvp does with the PATH of the program."""
    if b"/" in name:
        return [name]
    paths = [
        os.path.join(folder or b".", name)
        for folder in env.get(b"PATH", os.defpath.encode()).split(b":")
    ]
    # A failed spawn costs a process, so paths that do not exist are left out.
    return [path for path in paths if os.path.lexists(path)] if name else []
