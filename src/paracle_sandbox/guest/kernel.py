"""Kernel calls that the standard library does not wrap, or wraps too slowly for a guest."""

import ctypes
import os
import resource
import signal
from typing import Optional

SET_DUMPABLE = 4
SET_CHILD_SUBREAPER = 36
_CLOSE_RANGE = 436  # the same number on every architecture

_NO_SIGNALS = bytes(128)
_ALL_SIGNALS = [int(number) for number in signal.valid_signals()]
_MOST_WAITING = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptsname.restype = ctypes.c_char_p
# ctypes creates an object for each function on first use. Done here, forks share it.
for _name in ("prctl", "pthread_sigmask", "syscall"):
    getattr(_libc, _name)
# A fork needs this handle: calls through _libc release the interpreter's lock meanwhile.
_holding_lock = ctypes.PyDLL(None, use_errno=True)


def fork() -> int:
    """Fork without the handlers that os.fork runs in the child. Raises OSError.

    Those handlers, registered by modules of the standard library, create new locks and renumber
    threads, which makes the child copy hundreds of pages. A process without threads does not need
    them, and a program gets a fresh state in any case (python/interpreter_state).
    """
    pid: int = _holding_lock.fork()
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


def end_child(pid: int) -> None:
    """Kill a child that was not reaped yet. Later, its number may be another process's."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was no child of ours


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError if the kernel refuses."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, "prctl %d: %s" % (option, os.strerror(code)))


def slave_path(master: int) -> bytes:
    """Return the path of the slave side of a terminal. Raises OSError."""
    # os.ttyname would look into /proc/self/fd, which a guest that is not dumpable cannot open.
    path: Optional[bytes] = _libc.ptsname(master)
    if path is None:
        raise OSError(ctypes.get_errno(), "the terminal has no name")
    return path


def unblock_signals() -> None:
    """Unblock all signals of this process."""
    # signal.pthread_sigmask makes an enum member of every signal that was blocked: 0.1 ms.
    _libc.pthread_sigmask(signal.SIG_SETMASK, _NO_SIGNALS, None)


def drop_signals() -> None:
    """Discard the signals that are pending because they are blocked."""
    for _ in range(_MOST_WAITING):
        if signal.sigtimedwait(_ALL_SIGNALS, 0) is None:
            return


def block_signals(all_but: int) -> None:
    """Block all signals of this process except one."""
    # This is the plain system call: the C library never blocks two signals that it uses itself,
    # and those would end a process that has not started threads.
    mask = ~(1 << (all_but - 1)) & 0xFFFFFFFFFFFFFFFF
    number = {"x86_64": 14, "aarch64": 135}.get(os.uname().machine)
    if number is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {all_but})
        return
    _libc.syscall(number, signal.SIG_SETMASK, ctypes.byref(ctypes.c_uint64(mask)), None, 8)


def close_from(low: int) -> None:
    """Close every descriptor that is ``low`` or higher, whether we know it or not."""
    if _libc.syscall(_CLOSE_RANGE, ctypes.c_uint(low), ctypes.c_uint(0xFFFFFFFF), 0) == 0:
        return
    # Kernels before 5.9 come here. Listing /proc/self/fd would be faster, but we cannot open it
    # while we are not dumpable.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(low, 1 << 20 if soft == resource.RLIM_INFINITY else soft)
