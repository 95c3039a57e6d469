"""One forked child on its way to being a sandbox, as its spawner sees it, and its own first steps.

spawner: fork ─ attach to cgroup ─ "go" ─────────────── "ok" ─ park, or hand over ─ kill ─ reap
child:         wait ───────────────────── confine ───── serve as the guest ...
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import kernel
from .confine import Filters, Identity, Shape, StepFailed, Steps, confine

_CHANNEL_FD = 3
_STATUS_FD = 4


@dataclass
class Child:
    """What the spawner knows of one child."""

    slot: str
    shape: Shape
    identity: Identity
    pid: int = 0
    pidfd: int = -1
    status: socket.socket | None = None
    host_end: socket.socket | None = None
    disk_fd: int = -1
    state: str = "starting"  # starting, parked, running, dying
    request: dict[str, Any] | None = None
    waiters: list[int] = field(default_factory=list)
    failure: dict[str, Any] | None = None

    def close(self) -> None:
        for sock in (self.status, self.host_end):
            if sock is not None:
                sock.close()
        for fd in (self.pidfd, self.disk_fd):
            if fd >= 0:
                os.close(fd)
        self.status = self.host_end = None
        self.pidfd = self.disk_fd = -1


def fork(child: Child, own_pidns: int, failpoints: dict[str, str], setup: dict[str, Any],
         filters: Filters) -> None:  # fmt: skip
    """Fork the process that becomes PID 1 of a new pid namespace."""
    host_end, guest_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel.unshare(kernel.CLONE_NEWPID)
    try:
        pid = os.fork()
        if pid == 0:
            _run(child, guest_end, theirs, failpoints, setup, filters)
    finally:
        # Where later forks go; without this the next unshare would be refused.
        kernel.setns(own_pidns, kernel.CLONE_NEWPID)
    guest_end.close()
    theirs.close()
    child.pid = pid
    child.pidfd = os.pidfd_open(pid)
    child.status, child.host_end = ours, host_end
    ours.setblocking(False)


def _run(child: Child, channel: socket.socket, status: socket.socket, failpoints: dict[str, str],
         setup: dict[str, Any], filters: Filters) -> NoReturn:  # fmt: skip
    """The child itself. Whatever happens, it never returns into the spawner's code."""
    try:
        _keep_only(channel.fileno(), status.fileno())
        channel.detach()
        status.detach()
        with socket.socket(fileno=_STATUS_FD) as report:
            if report.recv(8) != b"go":
                os._exit(1)
            steps = Steps(failpoints, lambda step: _pause_at(report, step))
            try:
                confine(
                    child.slot,
                    child.shape,
                    child.identity,
                    steps,
                    filters,
                    lambda fd: _show_disk(report, fd),
                )
            except StepFailed as failed:
                report.send(json.dumps({"step": failed.step, "message": str(failed)}).encode())
                os._exit(1)
            os.dup2(0, 2)
            report.send(b"ok")
        from ..guest.main import serve

        serve(_CHANNEL_FD, setup)
    except BaseException as error:  # noqa: BLE001  whatever it is, this process ends here
        with contextlib.suppress(OSError):
            os.write(2, f"child failed: {error!r}\n".encode())
    finally:
        os._exit(1)
    raise AssertionError("unreachable")


def _keep_only(channel: int, status: int) -> None:
    """/dev/null, stderr until confined, the channel, the status socket, and no other."""
    high_channel, high_status = os.dup(channel), os.dup(status)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    first_free = max(high_channel, high_status, null) + 1
    channel_copy, status_copy = first_free, first_free + 1
    os.dup2(high_channel, channel_copy)
    os.dup2(high_status, status_copy)
    os.dup2(channel_copy, _CHANNEL_FD, inheritable=False)
    os.dup2(status_copy, _STATUS_FD, inheritable=False)
    kernel.close_from(_STATUS_FD + 1)


def _show_disk(report: socket.socket, fd: int) -> None:
    socket.send_fds(report, [b"disk"], [fd])


def _pause_at(report: socket.socket, step: str) -> None:
    """A failpoint: tell the spawner where we are, and wait for what it does about it."""
    report.send(json.dumps({"at": step}).encode())
    report.recv(8)
