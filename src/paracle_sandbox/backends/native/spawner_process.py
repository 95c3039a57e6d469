"""Starting the process that becomes a spawner.

That takes as long as our own imports, and it needs to know nothing until it has imported what is
its own: a command line program can have it started first thing (``launch_ahead``), and the two
go on side by side. Once it is known what for, it can be told that too before there is a backend
(``tell_ahead``). It ends by itself when it is told nothing and its owner hangs up.

Imported before everything else, and so without what takes long: ``subprocess`` and ``json`` do.
"""

from __future__ import annotations

import _socket
import fcntl
import functools
import os
import select
import signal
import sys
from _thread import allocate_lock
from contextlib import ExitStack, suppress

TYPE_CHECKING = False

if TYPE_CHECKING:
    import socket

PACKAGE_PATH = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
_CONTROL = 3
END_SECONDS = 20.0
# The path of the package comes over the socket: a command line can be read inside. Collecting
# garbage would cost a tenth of the imports, and is for later.
_PROGRAM = f"""
import gc; gc.disable()
import os, socket, sys; control = socket.socket(fileno={_CONTROL})
package = os.fsdecode(control.recv(65536)); sys.path.insert(0, package)
from paracle_sandbox.jail.launch import main; main(control, package)
"""


class Process:
    """One that was started here, with the methods of subprocess.Popen that its users want."""

    def __init__(self, pid: int, stderr: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.stderr = open(stderr, "rb", 0)  # noqa: SIM115  closed by `finish`
        self._code: int | None = None
        self._lock = allocate_lock()

    def poll(self) -> int | None:
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises TimeoutError."""
        code = self._end(timeout)
        if code is None:
            raise TimeoutError(f"process {self.pid} has not ended")
        return code

    def watch(self) -> int | None:
        """A new descriptor, which can be read once it has ended; None when that is known."""
        with self._lock:
            return os.dup(self._pidfd) if self._code is None else None

    def finish(self, timeout: float = END_SECONDS) -> None:
        """Wait until it has ended, which it was told to do; in the end by force."""
        try:
            self.wait(timeout)
        except TimeoutError:
            self.kill()
            self.wait()
        self.stderr.close()

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _end(self, timeout: float | None) -> int | None:
        with self._lock:
            if self._code is None:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                if poll.poll(None if timeout is None else timeout * 1000):
                    self._code = self._reap()
                    os.close(self._pidfd)
            return self._code

    def _reap(self) -> int:
        try:
            end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:  # somebody waits for all children, or for none
            return 0
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


class Launched:
    """A process that waits for its options on the other end of ``control``, or has them."""

    def __init__(self, process: Process, control: _socket.socket) -> None:
        self.process = process
        self.told: bytes | None = None
        self._raw = control

    def tell(self, options: bytes) -> None:
        """Send the options, and a descriptor of this process, for which it lives: a pid means
        nothing in its pid namespace."""
        if self.told is not None:
            return
        own = os.pidfd_open(os.getpid())
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, own.to_bytes(4, sys.byteorder))
        try:
            # It has ended: its last words say why.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._raw.sendmsg([options], [rights])
        finally:
            os.close(own)
        self.told = options

    def end(self) -> None:
        """Hang up, and wait until it has removed all that it has made."""
        self.control.close()
        self.process.finish()

    @property
    def control(self) -> socket.socket:
        import socket

        if not isinstance(self._raw, socket.socket):
            self._raw = socket.socket(fileno=self._raw.detach())
            self._raw.setblocking(False)
        return self._raw


_ahead: dict[str, Launched] = {}


@functools.cache
def default_python() -> str:
    """The interpreter below this one's virtual environment, if any: the same that sandboxes run."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def launch_ahead() -> None:
    """Start one now, for the next ``launch`` of the usual interpreter."""
    python = default_python()
    if python not in _ahead:
        _ahead[python] = _launch(python)


def tell_ahead(python: str, options: bytes) -> bool:
    """Have one that was started ahead go on, if there is one."""
    if python not in _ahead:
        return False
    try:
        _ahead[python].tell(options)
    except OSError:
        return False
    return True


def end_ahead() -> None:
    """End those that were started ahead: no backend will come."""
    while _ahead:
        _ahead.popitem()[1].end()


def withdraw(python: str, options: bytes) -> Launched | None:
    """One that was started ahead and was told something else than is wanted now, for the caller to
    end: that takes as long as the removal of what it has made."""
    launched = _ahead.get(python)
    return None if launched is None or launched.told in (None, options) else _ahead.pop(python)


def launch(python: str) -> Launched:
    """A process that waits for its options, or was told them ahead: call ``withdraw`` before."""
    launched = _ahead.pop(python, None)
    if launched is None:
        launched = _launch(python)
    return launched


def _launch(python: str) -> Launched:
    """Raises OSError, and then nothing is left of it."""
    with ExitStack() as undo:
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        undo.callback(ours.close)
        with ExitStack() as given:
            given.callback(theirs.close)
            last_words, stderr = os.pipe()
            undo.callback(os.close, last_words)
            given.callback(os.close, stderr)
            # Above the numbers that they get below, whichever of those the caller had closed.
            high = []
            for fd in (theirs.fileno(), stderr):
                high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _CONTROL + 1))
                given.callback(os.close, high[-1])
            pid = _spawn(python, *high)
        try:
            process = Process(pid, last_words)
        except OSError:
            # It is not waited for yet, so the number is its own.
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        with suppress(BrokenPipeError, ConnectionResetError):  # its last words say why
            ours.send(os.fsencode(PACKAGE_PATH))
        undo.pop_all()
    return Launched(process, ours)


def _spawn(python: str, control: int, stderr: int) -> int:
    return os.posix_spawn(
        python,
        [python, "-I", "-S", "-E", "-c", _PROGRAM],
        # The locale that programs will have; nothing else of ours.
        {"LANG": "C.UTF-8"},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, control, _CONTROL),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        ],
        setsid=True,
        # Whatever this process ignores would be ignored there, too.
        setsigdef=(signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
    )
