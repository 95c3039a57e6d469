"""Fork by the plain system call, where the C library has no function for what is wanted.

What the library's `fork` does besides, in a process with one thread, is to have the kernel write
down the number of the new thread, and to tell the kernel where the thread keeps the list of its
locks. `find_thread` looks both places up when this module is imported: a sandbox may refuse that
later, and forks have them where we have them.
"""

import ctypes
import os
import sys
from typing import Any, NamedTuple, Optional, Tuple

CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x200000, 0x1000000
_CLONE_PARENT = 0x8000
_PR_GET_TID_ADDRESS = 40
# (Which signal the parent gets is that of the caller's own end.)
_SIBLING = _CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID


class _Calls(NamedTuple):
    clone: int
    set_robust_list: int
    get_robust_list: int
    tid_is_last: bool


class Thread(NamedTuple):
    """Where the C library keeps what the kernel has to know of a thread."""

    tid: int
    locks: int
    locks_size: int


# It keeps the interpreter's lock, as has to be when there are suddenly two of us.
_libc = ctypes.PyDLL(None, use_errno=True)
_calls = {
    "x86_64": _Calls(56, 273, 274, False),
    "aarch64": _Calls(220, 99, 100, True),
}.get(os.uname().machine)


def _is_known_library() -> bool:
    """Before 2.25 it keeps the number of the process, too, which only its own `fork` renews."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 25)
    except (OSError, ValueError):
        return False


def _find_thread() -> Optional[Thread]:
    # A machine's other, smaller kind of programs has other numbers for all calls.
    if _calls is None or sys.maxsize < 1 << 32 or not _is_known_library():
        return None
    tid, locks, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), None, None, None) != 0:
        return None
    found = _libc.syscall(_calls.get_robust_list, 0, ctypes.byref(locks), ctypes.byref(size))
    if found != 0 or not tid.value or not locks.value:
        return None
    return Thread(tid.value, locks.value, size.value)


_thread = _find_thread()
# What is passed, made here: objects that are new need memory, and forks write to the pages of both.
_clone: Tuple[Any, ...] = ()
_set_locks: Tuple[Any, ...] = ()
if _calls and _thread:
    _tid = ctypes.c_void_p(_thread.tid)
    _last = (None, _tid) if _calls.tid_is_last else (_tid, None)
    _clone = (_calls.clone, ctypes.c_ulong(_SIBLING), None, None, *_last)
    _locks = ctypes.c_void_p(_thread.locks)
    _set_locks = (_calls.set_robust_list, _locks, ctypes.c_size_t(_thread.locks_size))
_syscall = _libc.syscall


def main_thread() -> Optional[Thread]:
    """This process's only thread; None where the library is not known, or keeps its number
    elsewhere: other C libraries have the kernel write something else there."""
    known = _thread is not None and ctypes.c_int.from_address(_thread.tid).value == os.getpid()
    return _thread if known else None


def fork_by(*call: Any) -> int:
    """Make this system call, which forks as `kernel.fork` does. Call it only where `main_thread`
    has an answer. Returns the pid here, and 0 there. Raises OSError."""
    pid: int = _syscall(*call)
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if pid == 0:
        _syscall(*_set_locks)
    return pid


def fork_sibling() -> int:
    """Fork a child of our parent. Raises OSError."""
    return fork_by(*_clone)
