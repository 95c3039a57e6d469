"""The mold: the process that every sandbox is a fork of.

    spawner ── mold ── sandbox, sandbox, ...

A fork shares the memory of its parent until one of them writes to it, page by page. The spawner
writes all the time: each sandbox would be left with its own copy of what the spawner had, and the
spawner would copy its pages again after each fork. The mold does nothing but import what programs
may want, go through what its children will do (`rehearsal`), and fork. Sandboxes die with it, and
it dies with the spawner, which is PID 1.

Messages are a word and what goes with it, one a packet. What is only for a child is not read here:
each page that the mold writes to is copied, as long as a sandbox shares it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
from typing import Any, NoReturn

from ..guest.kernel import fork
from ..guest.main import file_operations
from ..guest.program import make_ready
from ..guest.program_state import forget_guest, imported_names, reset_hooks
from . import kernel
from .child import Child, Order, Start, run_child
from .rehearsal import rehearse

_MAX_MESSAGE = 1 << 16

_Answer = tuple[bytes, list[int]]


class Mold:
    """The spawner's side. ``missing``: modules that could not be imported."""

    def __init__(self, start: Start, modules: list[str], not_theirs: tuple[int, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for fd in (*not_theirs, self._socket.fileno()):
                os.close(fd)
            self._socket.detach()
            _serve(theirs, start)
        theirs.close()
        self.pidfd = os.pidfd_open(pid)
        self._news = select.poll()
        for fd in (self._socket.fileno(), self.pidfd):
            self._news.register(fd, select.POLLIN)
        self.missing: list[str] = self.preload(modules)

    def preload(self, modules: list[str]) -> list[str]:
        """Import them once, so that no sandbox pays for them. Returns those that failed."""
        missing, _ = self._ask(b"import", json.dumps(modules).encode())
        return list(json.loads(missing))

    def rehearse(self, child: Child, setup: dict[str, Any]) -> None:
        """Have it do once what each child like this one will do."""
        self._ask(b"rehearse", child.order(setup))

    def begin_fork(self, child: Child, setup: dict[str, Any]) -> None:
        """Have the process forked that becomes PID 1 of a new pid namespace. Raises OSError.

        `end_fork` has to come next."""
        host_end, guest_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child.status, child.host_end = ours, host_end
        with guest_end, theirs:
            self._send(b"fork", child.order(setup), (guest_end.fileno(), theirs.fileno()))

    def end_fork(self, child: Child) -> None:
        """It is there, and waits for a word. Raises OSError."""
        answer, fds = self._receive()
        if not fds:
            number, _, text = answer.decode().partition(" ")
            raise OSError(int(number), text)
        assert child.status is not None
        child.pid, child.pidfd = int(answer), fds[0]
        child.status.setblocking(False)

    def _ask(self, word: bytes, details: bytes) -> _Answer:
        self._send(word, details)
        return self._receive()

    def _send(self, word: bytes, details: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._socket, [word, b" ", details], fds)

    def _receive(self) -> _Answer:
        # A child that was just forked has the mold's end of the socket, too: that tells no end.
        if self._socket.fileno() not in (fd for fd, _ in self._news.poll()):
            raise BrokenPipeError(32, "the mold has ended")
        packet, received, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE, 1)
        if not packet:
            raise BrokenPipeError(32, "the mold has ended")
        return packet, received


def _serve(control: socket.socket, start: Start) -> NoReturn:
    """The mold itself."""
    operations = {b"import": _import, b"rehearse": _rehearse, b"fork": _fork}
    try:
        site.addsitepackages(set(), [sys.base_prefix, sys.base_exec_prefix])
        make_ready(start.env, start.python)
        file_operations()  # while it can be imported
        forget_guest()
        while True:
            packet, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 2)
            if not packet:
                break
            word, _, details = packet.partition(b" ")
            answer, given = operations[word](details, fds, start)
            socket.send_fds(control, [answer], given)
            for fd in given:
                os.close(fd)
    finally:
        os._exit(1)
    raise AssertionError("unreachable")


def _import(modules: bytes, _fds: list[int], _start: Start) -> _Answer:
    missing = [name for name in json.loads(modules) if not _try_import(name)]
    reset_hooks()
    imported_names()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as it was: see `launch`
    # Collected objects would be written to in every child, and their pages copied.
    gc.collect()
    gc.freeze()
    return json.dumps(missing).encode(), []


def _rehearse(order: bytes, _fds: list[int], start: Start) -> _Answer:
    try:
        _kept.extend(rehearse(Order.read(order), start))
    except Exception as error:  # noqa: BLE001 - it is for the sake of memory: all works without
        os.write(2, f"rehearsal: {error!r}\n".encode())
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):  # a C library that has no such thing
        kernel.trim_heap()
    return b"done", []


_kept: list[object] = []


def _try_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a package may raise anything; the sandbox works without it
        return False
    return True


def _fork(order: bytes, fds: list[int], start: Start) -> _Answer:
    channel, status = fds
    pid = 0
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = fork()
            if pid == 0:
                run_child(order, start, channel, status)
        finally:
            # Where later forks go; without this the next unshare would be refused.
            kernel.setns(start.own_pidns, kernel.CLONE_NEWPID)
        return b"%d" % pid, [os.pidfd_open(pid)]
    except OSError as error:
        # What nobody can watch must not live. If it does not, the number may be another's.
        if pid and not isinstance(error, ProcessLookupError):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{error.errno or 0} {error}".encode(errors="replace"), []
    finally:
        for fd in fds:
            os.close(fd)
