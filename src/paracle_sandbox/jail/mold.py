"""The mold: the process that every sandbox is a fork of.

    spawner ── mold ── sandbox, sandbox, ...

A fork shares the memory of its parent until one of them writes to it, page by page. The spawner
writes all the time: each sandbox would be left with its own copy of what the spawner had, and the
spawner would copy its pages again after each fork. The mold does nothing but import what programs
may want, go through what its children will do (`rehearsal`), and fork. Sandboxes die with it, and
it dies with the spawner, which is PID 1.

Messages are JSON, one a packet; the spawner waits for each answer.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import site
import socket
import sys
from typing import Any, NoReturn

from ..guest.kernel import fork
from ..guest.program import make_ready
from ..guest.program_state import remember_guest_modules
from . import kernel
from .cgroups import Limits
from .child import Child, Start, run_child
from .confine import Identity, Shape
from .place import Grant
from .rehearsal import rehearse

_MAX_MESSAGE = 1 << 16
_MOST_OWED = 64  # answers, of which the socket holds some hundreds


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
        self._owed = 0  # answers that nobody has waited for yet
        self.pidfd = os.pidfd_open(pid)
        self.missing: list[str] = self.preload(modules)

    def preload(self, modules: list[str]) -> list[str]:
        """Import them once, so that no sandbox pays for them. Returns those that failed."""
        answer, _ = self._ask({"op": "import", "modules": modules})
        return list(answer["missing"])

    def rehearse(self, child: Child, setup: dict[str, Any]) -> None:
        """Have it do once what each child like this one will do."""
        self._ask({"op": "rehearse", **_order(child, setup)})

    def fork(self, child: Child, setup: dict[str, Any]) -> None:
        """Fork the process that becomes PID 1 of a new pid namespace. Raises OSError."""
        host_end, guest_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"op": "fork", **_order(child, setup)}
        child.status, child.host_end = ours, host_end
        with guest_end, theirs:
            answer, fds = self._ask(order, (guest_end.fileno(), theirs.fileno()))
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"])
        child.pid, child.pidfd = answer["pid"], fds[0]
        ours.setblocking(False)

    def reap(self, pid: int) -> None:
        """It has ended: let its number go. That it has gone is waited for by `settle`."""
        self._send({"op": "reap", "pid": pid})
        self._owed += 1
        if self._owed >= _MOST_OWED:
            self.settle()

    def settle(self) -> None:
        """Whatever was to be reaped has been. Raises OSError."""
        while self._owed:
            self._owed -= 1
            self._receive()

    def _ask(
        self, message: dict[str, Any], fds: tuple[int, ...] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        self.settle()
        self._send(message, fds)
        return self._receive()

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self._socket, [json.dumps(message).encode()], fds)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        packet, received, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE, 1)
        if not packet:
            raise BrokenPipeError(32, "the mold has ended")
        return json.loads(packet), received


def _order(child: Child, setup: dict[str, Any]) -> dict[str, Any]:
    return {
        "slot": child.slot,
        "shape": child.shape._asdict(),
        "identity": child.identity._asdict(),
        "limits": child.grant.limits._asdict(),
        "disk_bytes": child.grant.disk_bytes,
        "setup": setup,
    }


def _ordered(message: dict[str, Any]) -> Child:
    return Child(
        message["slot"],
        Shape(**message["shape"]),
        Identity(**message["identity"]),
        Grant(Limits(**message["limits"]), message["disk_bytes"]),
    )


def _serve(control: socket.socket, start: Start) -> NoReturn:
    """The mold itself."""
    operations = {"import": _import, "rehearse": _rehearse, "fork": _fork, "reap": _reap}
    try:
        site.addsitepackages(set(), [sys.base_prefix, sys.base_exec_prefix])
        make_ready(start.env)
        while True:
            packet, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 2)
            if not packet:
                break
            message = json.loads(packet)
            answer, given = operations[message["op"]](message, fds, start)
            socket.send_fds(control, [json.dumps(answer).encode()], given)
            for fd in given:
                os.close(fd)
    finally:
        os._exit(1)
    raise AssertionError("unreachable")


_Answer = tuple[dict[str, Any], list[int]]


def _import(message: dict[str, Any], _fds: list[int], _start: Start) -> _Answer:
    missing = [name for name in message["modules"] if not _try_import(name)]
    # Collected objects would be written to in every child, and their pages copied.
    remember_guest_modules()
    gc.collect()
    gc.freeze()
    return {"missing": missing}, []


def _rehearse(message: dict[str, Any], _fds: list[int], start: Start) -> _Answer:
    try:
        _kept.extend(rehearse(_ordered(message), start, message["setup"]))
    except Exception as error:  # noqa: BLE001 - it is for the sake of memory: all works without
        os.write(2, f"rehearsal: {error!r}\n".encode())
    gc.collect()
    gc.freeze()
    return {}, []


_kept: list[object] = []


def _try_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a package may raise anything; the sandbox works without it
        return False
    return True


def _fork(message: dict[str, Any], fds: list[int], start: Start) -> _Answer:
    child = _ordered(message)
    channel, status = fds
    pid = 0
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = fork()
            if pid == 0:
                run_child(child, start, channel, status, message["setup"])
        finally:
            # Where later forks go; without this the next unshare would be refused.
            kernel.setns(start.own_pidns, kernel.CLONE_NEWPID)
        return {"pid": pid}, [os.pidfd_open(pid)]
    except OSError as error:
        if pid:  # what nobody can watch must not live
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return {"errno": error.errno or 0, "error": str(error)}, []
    finally:
        for fd in fds:
            os.close(fd)


def _reap(message: dict[str, Any], _fds: list[int], _start: Start) -> _Answer:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(message["pid"], 0)
    return {}, []
