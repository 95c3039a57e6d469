"""A program that has nothing to do, from its fork to its end, played in the zygote.

Every step is that of a real one (`guest.prefork.preforked`, `guest.python.program`), but for those
that would change this process for good: they are props. So programs find the code that leads to
them settled, and what Python remembers of it in place.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from ...channel import frames
from ...guest import kernel
from ...guest.prefork import early_exit, preforked
from ...guest.prefork.policy import REQUEST
from ...guest.python import exit, interpreter_state, program, stack
from ...guest.request import parse_python

_SOME_STATE = 1  # of a thread; nobody looks at it


class _Over(BaseException):
    """It would have ended here."""


def play_program(setup: dict[str, Any]) -> None:
    """Raises RuntimeError if it did not come to its end."""
    likely = parse_python(frames.decode_json(REQUEST), setup).program
    if likely is None or not _can_be_played(likely["env"], likely["python"]):
        return
    likely.update(path=os.devnull, rehearsal=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, _closed_in_the_end(theirs), open(os.devnull, "rb") as null:
        stdio = (null.fileno(),) * 3
        preforked.Seed(ours, os.getpid, {}).start(likely, b"/", terminal=False, stdio=stdio)
        exits: list[int] = []
        with _kept_sys(), _kept_threading(), _props(exits), contextlib.suppress(_Over):
            preforked.become_seed(theirs, None, tells=True)
    if exits != [0, 1, preforked.NO_PROGRAM]:
        raise RuntimeError(f"a program did not come to its end: {exits}")


def _can_be_played(env: dict[str, str], python: str) -> bool:
    """Whether it would neither change our surroundings nor be left to a new interpreter."""
    changes = any(env.get(name) for name in ("PYTHONWARNINGS", "PYTHONFAULTHANDLER"))
    ready = stack.SUPPORTED and program.is_ready(env, python)
    return ready and not changes and not program.customized(env)


@contextlib.contextmanager
def _closed_in_the_end(end: socket.socket) -> Iterator[None]:
    """A program lets go of it, and leaves it to be closed with all others."""
    number = end.fileno()
    try:
        yield
    finally:
        if end.fileno() < 0:
            os.close(number)
        end.close()


@contextlib.contextmanager
def _props(exits: list[int]) -> Iterator[None]:
    """Nothing below is done to this process. exits: the statuses that it would have ended with."""

    def leave(status: int) -> None:
        exits.append(status)
        if len(exits) > 1:  # the first is inside of a call from C, which raises nothing
            raise _Over

    with contextlib.ExitStack() as undo:
        undo.callback(early_exit._announced.clear)
        for place, name, prop in (
            (os, "_exit", leave),
            (os, "execvpe", _refuse),
            (os, "setsid", _nothing),
            (os, "chdir", _nothing),
            (os, "closerange", _nothing),
            (os, "dup2", lambda fd, _: os.close(fd)),
            (signal, "set_wakeup_fd", _nothing),
            (signal, "sigtimedwait", _nothing),
            (_signal, "set_wakeup_fd", _nothing),
            (_signal, "signal", _nothing),
            (faulthandler, "disable", _nothing),
            (sys.modules.get("threading"), "_shutdown", _nothing),
            (gc, "freeze", _nothing),  # with all that is still to be collected
            (gc, "collect", _nothing),
            (early_exit, "_queue", _nothing),
            (early_exit, "_kill", _nothing),
            (kernel._libc, "syscall", _done),
            (kernel._libc, "prctl", _done),
            (kernel._libc, "pthread_sigmask", _done),
            (exit, "_collect", _nothing),
            (exit, "_leave", leave),
            (exit, "_has_descriptors", _nothing),
            (exit, "_run_exit_callbacks", _nothing),
            (exit, "_without", lambda _: ()),
            (stack, "_new", lambda _: _SOME_STATE),
            (stack, "_swap", _nothing),
            (stack, "_clear", _nothing),
            (stack, "_delete", _nothing),
            (stack, "_leave_recursion", _nothing),
            (stack, "_getprofile", _nothing),  # the one that looks on is no program's
        ):
            if hasattr(place, name):
                undo.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, prop)
        yield


def _done(*_: object) -> int:
    return 0


def _nothing(*_: object) -> None:
    pass


def _refuse(*_: object) -> NoReturn:
    raise PermissionError("not in a rehearsal")


@contextlib.contextmanager
def _kept_sys() -> Iterator[None]:
    """What a program's start and end do to `sys` and the list of modules."""
    kept, path, modules = dict(vars(sys)), sys.path[:], dict(sys.modules)
    callbacks = gc.callbacks[:]
    try:
        yield
    finally:
        gc.callbacks[:] = callbacks
        vars(sys).clear()
        vars(sys).update(kept)
        sys.path[:] = path
        sys.modules.update(modules)


@contextlib.contextmanager
def _kept_threading() -> Iterator[None]:
    threading: Any = sys.modules.get("threading")
    hook = getattr(threading, "excepthook", None)
    try:
        yield
    finally:
        if threading is not None:
            threading.excepthook = hook
            interpreter_state.reset_threading()
