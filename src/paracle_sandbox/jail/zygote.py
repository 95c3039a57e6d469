"""The zygote: the process that every sandbox is a fork of.

    spawner ── zygote ── sandbox, sandbox, ...

A fork shares the memory of its parent until one of them writes to it, page by page. The spawner
writes all the time: each sandbox would be left with its own copy of what the spawner had, and the
spawner would copy its pages again after each fork. The zygote does nothing but import what programs
may want, and fork. Sandboxes die with it, and it dies with the spawner, which is PID 1.

Messages are a word and what goes with it, one a packet. What is only for a child is sent over the
child's own socket: what the zygote hears is in the memory of every later sandbox.

What a template brings is imported here, in a process that has to fork root's children and so cannot
be an ordinary one. Before that it gives up what it can: the host's network, and all capabilities
that no step of a child takes. Lines of .pth files, which Python executes when it starts, are left
to programs. What remains is CAP_SYS_ADMIN: modules that a template imports ahead of need are
trusted.
"""

from __future__ import annotations

import contextlib
import errno
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
from ..guest.python.interpreter_state import add_packages, forget_guest, imported_names, reset_hooks
from ..guest.python.program import make_ready
from . import kernel
from .child import Child, Start, run_child
from .clone import fork_into

_MAX_MESSAGE = 1 << 16
# What steps of `confine`, and of entering a place, take.
_NEEDED_CAPABILITIES = sum(
    1 << number
    for number in (
        0,  # CAP_CHOWN: of the workspace
        1,  # CAP_DAC_OVERRIDE: control groups of another's making
        3,  # CAP_FOWNER
        5,  # CAP_KILL: a child that nobody can watch
        6,  # CAP_SETGID
        7,  # CAP_SETUID
        8,  # CAP_SETPCAP: the bounding set
        12,  # CAP_NET_ADMIN: the loopback
        21,  # CAP_SYS_ADMIN: namespaces, mounts, subvolumes
        24,  # CAP_SYS_RESOURCE
    )
)

_Answer = tuple[bytes, list[int]]


class Zygote:
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

    def begin_fork(self, child: Child, setup: dict[str, Any], group: int | None = None) -> None:
        """Have the process forked that becomes PID 1 of a new pid namespace, in the cgroup that
        a descriptor names, if one does. Raises OSError.

        `end_fork` has to come next."""
        host_end, guest_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child.status, child.host_end = ours, host_end
        with guest_end, theirs:
            ours.send(child.order(setup))
            fds = guest_end.fileno(), theirs.fileno(), *(() if group is None else (group,))
            self._send(b"fork", b"%d" % len(fds), fds)

    def end_fork(self, child: Child) -> None:
        """It is there, and waits for a word. Raises OSError."""
        answer, fds = self._receive()
        if not fds:
            if answer.isdigit():  # it was forked, and its descriptor was not to be had: it ends
                raise OSError(errno.EMFILE, "the spawner has too many open files")
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
        # A child that was just forked has the zygote's end of the socket, too: that tells no end.
        if self._socket.fileno() not in (fd for fd, _ in self._news.poll()):
            raise BrokenPipeError(32, "the zygote has ended")
        packet, received, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE, 1)
        if not packet:
            raise BrokenPipeError(32, "the zygote has ended")
        return packet, received


def _serve(control: socket.socket, start: Start) -> NoReturn:
    """The zygote itself."""
    operations = {b"import": _import, b"fork": _fork}
    try:
        _give_up_privileges(start)
        add_packages(site.getsitepackages([sys.base_prefix, sys.base_exec_prefix]))
        make_ready(start.env, start.python)
        file_operations()  # while it can be imported
        forget_guest()
        while True:
            packet, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 3)
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


def _give_up_privileges(start: Start) -> None:
    """Where that of an ordinary user is all there is, there is nothing to give up."""
    if start.own_network < 0:
        return
    kernel.unshare(kernel.CLONE_NEWNET)
    kernel.limit_capabilities(start.capabilities & _NEEDED_CAPABILITIES)


def _import(modules: bytes, _fds: list[int], _start: Start) -> _Answer:
    missing = [name for name in json.loads(modules) if not _try_import(name)]
    reset_hooks()
    imported_names()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as it was: see `launch`
    # Collected objects would be written to in every child, and their pages copied.
    gc.collect()
    gc.freeze()
    return json.dumps(missing).encode(), []


def _try_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a package may raise anything; the sandbox works without it
        return False
    return True


def _fork(count: bytes, fds: list[int], start: Start) -> _Answer:
    pid = 0
    try:
        if len(fds) != int(count):  # the kernel could not give us all that came with the message
            raise OSError(errno.EMFILE, "the spawner has too many open files")
        channel, status, *group = fds
        if not group:
            kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = fork_into(kernel.CLONE_NEWPID, group[0]) if group else fork()
            if pid == 0:
                run_child(start, channel, status)
        finally:
            if not group:  # Where later forks go; without this the next unshare would be refused.
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
