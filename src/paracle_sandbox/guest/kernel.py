"""The few kernel calls the standard library does not wrap. Standard library only, Python 3.8."""

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
# ctypes makes an object of each when it is first asked for: here, where forks share it.
for _name in ("prctl", "pthread_sigmask", "syscall"):
    getattr(_libc, _name)
# Not _libc, whose calls let go of the interpreter's lock meanwhile.
_holding_lock = ctypes.PyDLL(None, use_errno=True)


def fork() -> int:
    """Fork, without what os.fork has every module do in the child.

    Those of the standard library that want something done make new locks and number threads anew,
    which costs a child hundreds of copied pages. A process without threads needs none of it, and
    a program gets its own in any case (program_state). Raises OSError.
    """
    pid: int = _holding_lock.fork()
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


def end_child(pid: int) -> None:
    """Kill one that nobody has waited for yet: its number is its own."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was no child of ours


def prctl(option: int, value: int) -> None:
    """Raises OSError when the kernel refuses."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, "prctl %d: %s" % (option, os.strerror(code)))


def slave_path(master: int) -> bytes:
    """The path of the other side of a terminal."""
    # Not os.ttyname: it looks into /proc/self/fd, which is closed to a guest that is not
    # dumpable.
    path: Optional[bytes] = _libc.ptsname(master)
    if path is None:
        raise OSError(ctypes.get_errno(), "the terminal has no name")
    return path


def unblock_signals() -> None:
    # signal.pthread_sigmask makes an enum member of every signal that was blocked: 0.1 ms.
    _libc.pthread_sigmask(signal.SIG_SETMASK, _NO_SIGNALS, None)


def drop_signals() -> None:
    """Those that wait for us, being blocked, and will come no more."""
    for _ in range(_MOST_WAITING):
        if signal.sigtimedwait(_ALL_SIGNALS, 0) is None:
            return


def block_signals(all_but: int) -> None:
    # The plain system call: the library leaves out two signals that it keeps for itself, and
    # those end a process that has not started threads.
    mask = ~(1 << (all_but - 1)) & 0xFFFFFFFFFFFFFFFF
    number = {"x86_64": 14, "aarch64": 135}.get(os.uname().machine)
    if number is None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {all_but})
        return
    _libc.syscall(number, signal.SIG_SETMASK, ctypes.byref(ctypes.c_uint64(mask)), None, 8)


def close_from(low: int) -> None:
    """Close every descriptor from low on, known to us or not."""
    if _libc.syscall(_CLOSE_RANGE, ctypes.c_uint(low), ctypes.c_uint(0xFFFFFFFF), 0) == 0:
        return
    # Kernels before 5.9. Listing /proc/self/fd would be faster, but is closed to us while we
    # are not dumpable.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(low, 1 << 20 if soft == resource.RLIM_INFINITY else soft)
