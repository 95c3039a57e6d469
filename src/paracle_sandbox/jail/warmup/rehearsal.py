"""What the zygote does once, so that its children share more of its memory with it.

A child has to copy each page that it writes to, and Python writes wherever it goes: it counts
references, and it rewrites code that it runs for the first few dozen times. So the code of children
is laid side by side, and the zygote runs it until it is settled: that of the guest as it is, with
nobody at the other end; programs, which nobody runs; and the steps of confinement on a stage, where
none reaches the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from _ctypes import CFuncPtr
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from ...guest.main import Guest
from ...guest.prefork import fork_server, preforked
from ...guest.prefork.early_exit import BY_QUEUE, TELLS_SUCCESS, agree
from ...guest.processes import process_table as guest_children
from ...guest.processes import spawn as guest_start
from .. import kernel
from ..child import Order, Start, keep_only
from ..confine import Steps, confine
from ..filters import syscalls
from ..filters.rules import UID_INSIDE
from .rehearsed_program import play_program

# Python 3.11 settles code that has run 8 times, and then each instruction after 16.
_ROUNDS = 30
_SOME_FD = 1 << 16  # is not open
_SOME_PID = 1 << 24  # is more than there can be
_PROGRAMS = 2  # the second follows the first at once, which is handled in another way
_LANDLOCK_ABI = 6
_POOL_BYTES = 16 << 10
_POOL_HEAD_BYTES = 64
_BLOCK_STEP = 16
_LARGEST_BLOCK = 512
_MOST_GAPS = 20_000
_LARGE_GAP = 4096
# Less than what the C library has pages of its own for: when those are given back, it keeps larger
# pieces for later, in all processes that come of this one.
_DOUBLINGS = 4
_CHUNK_HEAD_BYTES = 8
_MOST_FILLING = 16 << 20
_ROUNDING_BYTES = 8
_INSTRUCTION_BYTES = 2
# Any instruction will do that is never come to. Its number is in a module whose library would be
# mapped in every sandbox.
_RETURN = (lambda: None).__code__.co_code[-_INSTRUCTION_BYTES:]
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_LAST_CAPABILITY = 40
# What the steps ask for and need no answer to.
_DONE = ("chdir", "chmod", "chown", "close", "dup2", "ioctl", "mkdir", "mount", "setgroups",
         "sethostname", "setresgid", "setresuid", "setrlimit", "umount2", "unshare")  # fmt: skip


def rehearse(order: Order, start: Start) -> list[object]:
    """Do what ``run_child`` will do, as far as it can be done here. What is returned has to be
    kept: children would put objects of theirs into the gaps, and write to all pages around them.

    Raises anything, if the stage was not changed together with what is played there."""
    # What the loader binds when it is called first: below, a prop is called in its place.
    signal.sigtimedwait((signal.SIGRTMAX,), 0)
    codes: dict[int, CodeType] = {}
    sys.setprofile(lambda frame, *_: codes.setdefault(id(frame.f_code), frame.f_code))
    try:
        _play(order, start, 1)
    finally:
        sys.setprofile(None)
    filling = _lay_together(codes)
    _play(order, start, _ROUNDS)
    gc.collect()
    return [*codes.values(), *filling, *_fill_gaps()]


def _lay_together(codes: dict[int, CodeType]) -> list[bytes]:
    """Put copies of them side by side, in the order in which they were run. Returns what fills the
    gaps where they would lie otherwise."""
    gc.unfreeze()  # those that are frozen are not listed
    functions: dict[int, list[FunctionType]] = {}
    for item in gc.get_objects():
        if type(item) is FunctionType and id(item.__code__) in codes:
            functions.setdefault(id(item.__code__), []).append(item)
    filling = _fill_gaps()
    for number, code in codes.items():
        if number in functions:
            copy = _copy(code, codes)
            for function in functions[number]:
                function.__code__ = copy
    return filling


def _copy(code: CodeType, codes: dict[int, CodeType]) -> CodeType:
    """With that of functions inside of it, as far as they were run.

    Larger than what Python sorts by size: what it leaves to the C library comes to lie side by
    side. Only of what is ours: programs can look at the rest."""
    inside = [one for one in code.co_consts if id(one) in codes]
    if inside:
        copies = {id(one): _copy(one, codes) for one in inside}
        code = code.replace(co_consts=tuple(copies.get(id(one), one) for one in code.co_consts))
    short = _LARGEST_BLOCK + _ROUNDING_BYTES - sys.getsizeof(code)
    if short <= 0 or not code.co_filename.startswith(_OURS):
        return code if inside else code.replace()
    return code.replace(co_code=code.co_code + _RETURN * (short // _INSTRUCTION_BYTES))


def _fill_gaps() -> list[bytes]:
    """Use up the memory that is free between other objects, so that what children make comes to lie
    on pages that they need not copy. Returns what fills it.

    Python hands out memory in pools, each of blocks of one size, with a head at its start that is
    written to for every block. From a pool that is new, head and first blocks are on one page."""
    filling: list[bytes] = []
    for size in range(_BLOCK_STEP, _LARGEST_BLOCK + 1, _BLOCK_STEP):
        content = size - sys.getsizeof(b"")
        for _ in range(_MOST_GAPS if content > 0 else 0):
            block = bytes(content)
            if id(block) % _POOL_BYTES < _POOL_HEAD_BYTES:
                break  # let go of it: it is the first of what children will take
            filling.append(block)
    _fill_large_gaps()
    return filling


def _fill_large_gaps() -> None:
    """What is too large for a pool comes from the C library: from gaps, if there are, else from
    the end of its memory, if it is one that has an end. Large pieces first: what is inside of one
    is never written to, and its pages are not there."""
    left = _MOST_FILLING
    end = kernel.trim_heap() - _LARGE_GAP
    sizes = [_LARGE_GAP << more for more in range(_DOUBLINGS, 0, -1)]
    for size in (*sizes, *range(_LARGE_GAP, _LARGEST_BLOCK, -_BLOCK_STEP)):
        while left > 0:
            address = kernel.take_memory(size - _CHUNK_HEAD_BYTES)
            if not 0 < address < end:
                kernel.give_memory_back(address)
                break
            left -= size


def _play(order: Order, start: Start, rounds: int) -> None:
    dumpable = kernel.prctl(kernel.PR_GET_DUMPABLE)
    try:
        for _ in range(rounds):
            _play_guest(order.setup)
            play_program(order.setup)
    finally:
        kernel.prctl(kernel.PR_SET_DUMPABLE, dumpable)
    slot, shape, identity, disk_bytes, _ = order
    with _stage(order):
        for _ in range(rounds):
            steps = Steps({}, lambda _: None)
            start.place.enter(slot, shape, identity, disk_bytes, steps)
            keep_only(_SOME_FD, _SOME_FD)
            confine(slot, shape, identity, steps, start.filters, lambda _: None)


def _play_guest(setup: dict[str, Any]) -> None:
    """To new ears each time: nobody listens, and what was said must not pile up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        end = theirs.fileno()
        Guest(end, end, setup).rehearse()
        with _Nobody().instead_of_programs():
            Guest(end, end, setup).rehearse_programs(ours.send, _PROGRAMS)


class _Nobody:
    """A program that can be forked and started, tells of its end, is killed, and is not there."""

    def __init__(self) -> None:
        self._is_dead = False
        self._news: list[signal.struct_siginfo] = []
        self._ends: list[socket.socket] = []

    @contextlib.contextmanager
    def instead_of_programs(self) -> Iterator[None]:
        """Nothing below is done to a process."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            for place, name, prop in (
                (preforked, "fork", lambda: _SOME_PID),
                (os, "fork", _refuse),
                (os, "posix_spawn", _refuse),
                (guest_start, "fork", _refuse),
                (fork_server, "fork", _refuse),
                (os, "mkdir", lambda *_: None),
                (os, "open", self._open(os.open)),
                (os, "rename", lambda *_: None),
                (guest_children, "_read", lambda _: b""),
                (os, "chdir", lambda _: None),
                (os, "kill", self._kill),
                (os, "pwrite", lambda _, text, __: len(text)),
                (os, "waitpid", self._waitpid),
                (signal, "sigtimedwait", self._sigtimedwait),
                (socket, "socketpair", self._socketpair(socket.socketpair)),
            ):
                undo.callback(setattr, place, name, getattr(place, name))
                setattr(place, name, prop)
            yield

    def _close(self) -> None:
        for end in self._ends:
            end.close()

    def _kill(self, _pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            self._is_dead = True
        else:
            # It was woken up, for its program, and has come to its end.
            self._news = [
                signal.struct_siginfo((TELLS_SUCCESS, code, 0, _SOME_PID, 0, value, 0))
                for code, value in ((BY_QUEUE, agree()), (0, 0))
            ]

    def _sigtimedwait(self, _numbers: object, _seconds: float) -> signal.struct_siginfo | None:
        if not self._news:
            return None
        self._speak()
        return self._news.pop(0)

    def _speak(self) -> None:
        """Whoever was given streams says something, once."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                _, stdio, _, _ = socket.recv_fds(end, preforked.MAX_MESSAGE_BYTES, 3)
                with contextlib.ExitStack() as undo:
                    for fd in stdio:
                        undo.callback(os.close, fd)
                    if stdio:
                        os.write(stdio[1], b"x")

    def _waitpid(self, _pid: int, _options: int) -> tuple[int, int]:
        if not self._is_dead:
            raise ChildProcessError(errno.ECHILD, "nobody is there")
        self._is_dead = False
        return _SOME_PID, signal.SIGKILL

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        return lambda *_: real(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def _socketpair(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def pair(*kind: int) -> tuple[socket.socket, socket.socket]:
            ours, theirs = real(*kind)
            self._ends.append(theirs.dup())  # whoever is forked has it
            self._ends[-1].setblocking(False)
            return ours, theirs

        return pair


@contextlib.contextmanager
def _stage(order: Order) -> Iterator[None]:
    """Nothing below reaches the kernel. What is not expected here is refused."""
    props = _props(order)
    real: list[tuple[Any, str, object]] = []
    try:
        for place in (os, fcntl, resource, socket, kernel._libc, syscalls._libc):
            for name, value in list(vars(place).items()):
                if isinstance(value, (BuiltinFunctionType, CFuncPtr)):
                    real.append((place, name, value))
                    setattr(place, name, props.get(name, _refuse))
        yield
    finally:
        for place, name, value in real:
            setattr(place, name, value)


def _refuse(*_: object, **__: object) -> int:
    raise PermissionError(errno.EPERM, "not in a rehearsal")


def _props(order: Order) -> dict[str, Callable[..., Any]]:
    """What the steps have to be told for them to go on."""
    props: dict[str, Callable[..., Any]] = {
        name: getattr(os, name)
        for name in ("fspath", "getegid", "geteuid", "getpid", "strerror", "uname")
    }
    root = os.stat("/")
    seccomp = syscalls.NUMBERS[syscalls.architecture()]["seccomp"]
    for name in _DONE:
        props[name] = lambda *_, **__: 0
    for name in ("dup", "open"):
        props[name] = lambda *_, **__: _SOME_FD
    for name in ("fstat", "stat"):
        props[name] = lambda *_, **__: root
    for name in ("getresgid", "getresuid"):
        props[name] = lambda: (UID_INSIDE,) * 3
    props["getcwd"] = lambda: order.shape.working_dir
    props["getrlimit"] = resource.getrlimit
    props["prctl"] = _prctl
    props["read"] = lambda *_: b"\nCapPrm:\t0\n"
    props["syscall"] = lambda number, *_: 0 if number == seccomp else _LANDLOCK_ABI
    props["write"] = lambda _, content: len(content)
    return props


def _prctl(option: int, argument: int, *_: int) -> int:
    if option != kernel.PR_CAPBSET_DROP or argument <= _LAST_CAPABILITY:
        return 0
    ctypes.set_errno(errno.EINVAL)
    return -1
