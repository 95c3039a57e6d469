"""Hearing of the end of a program before the kernel tells of it.

It does when it has taken the memory of the process apart, which is a third of the time that a small
program takes. So a program that somebody is likely to wait for (`foresight`) says itself that it
has come to its end, with a signal, of which the kernel says who sent it. Whoever says so is killed:
then it has, and runs no more; that it is gone comes a moment later.

Programs may send each other any signal, and us. So one that comes to its end says a word before,
which only those know that were forked to tell, in a signal that can carry one.
"""

import ctypes
import os
import signal
from typing import Iterator, List, Tuple

# A signal for each of the statuses that nearly all programs end with. The guest blocks both.
TELLS_SUCCESS = int(signal.SIGRTMIN) + 7
_SIGNALS = {TELLS_SUCCESS: 0, TELLS_SUCCESS + 1: 1}
_NUMBERS = {status: number for number, status in _SIGNALS.items()}
_BY_KILL = 0  # whatever came in another way may say anything of its sender
BY_QUEUE = -1
_AT_ONCE = 32
_MOST = 4096
_SIGCHLD = int(signal.SIGCHLD)
# Not those of `os`: a program may have put something else in their place, or be told of their use.
_kill = ctypes.CDLL(None).kill
_kill.argtypes = (ctypes.c_int, ctypes.c_int)
_queue = ctypes.CDLL(None).sigqueue
_queue.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_getpid = os.getpid
# Who says when it ends, and to whom.
_announced: List[int] = []
# Whose it is, and the word.
_agreed: List[int] = [0, 0]
# Whether it was said since a program was started.
_heard: List[bool] = []


def agree() -> int:
    """The word of this process with those forks of it that will tell."""
    if _agreed[0] != os.getpid():
        _agreed[:] = [os.getpid(), 1 + int.from_bytes(os.urandom(3), "little")]
    return _agreed[1]


def announce_end() -> None:
    """From now on this process tells its parent when it ends. Forks of it do not."""
    _announced[:] = [os.getpid(), os.getppid()]


def tell_end(status: int) -> None:
    """Of another status the parent hears when it is there."""
    if _announced and _announced[0] == _getpid() and status in _NUMBERS:
        _queue(_announced[1], _NUMBERS[status], _agreed[1])
        _kill(_announced[1], _NUMBERS[status])
        _kill(_announced[1], _SIGCHLD)  # which it does not block: have it look


def told_ends() -> Iterator[Tuple[int, int]]:
    """Who told, and of which status; not more at once than others can wait for."""
    for _ in range(_AT_ONCE):
        news = signal.sigtimedwait(_SIGNALS, 0)
        if news is None:
            return
        # The value of a queued signal is where that of SIGCHLD has a status. (Where that is not so,
        # ends are heard of from the kernel.)
        if news.si_code == BY_QUEUE and news.si_status == agree():
            _heard[:] = [True]
        elif news.si_code == _BY_KILL and _heard:
            yield news.si_pid, _SIGNALS[news.si_signo]


def forget_told() -> None:
    """What was told before a program starts is not of its end, whatever number it gets."""
    _heard.clear()
    for _ in range(_MOST):
        if signal.sigtimedwait(_SIGNALS, 0) is None:
            return
