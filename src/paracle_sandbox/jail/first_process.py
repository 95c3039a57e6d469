"""The first process of a sandbox: its steps between the fork and `guest.main.serve`.

Whatever a child does on its way, it pays for with copies of the pages that it writes to.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any, NamedTuple, NoReturn

from ..guest.main import serve
from . import kernel
from .child import GO
from .confine import Filters, confine
from .limits.sandbox_resources import Place
from .shape import Identity, Shape
from .steps import StepFailed, Steps

_MAX_ORDER = 1 << 16
_CHANNEL_FD = 3
_STATUS_FD = 4
_UMASK = 0o022  # what programs expect, whatever the owner's is


class Order(NamedTuple):
    """The order that one child gets over its own socket."""

    slot: str
    shape: Shape
    identity: Identity
    disk_bytes: int
    setup: dict[str, Any]

    @classmethod
    def read(cls, text: bytes) -> Order:
        slot, shape, identity, *rest = json.loads(text)
        return cls(slot, Shape(*shape), Identity(*identity), *rest)


class Start(NamedTuple):
    """Everything that all children of one spawner start with."""

    own_pidns: int
    place: Place
    filters: Filters
    failpoints: dict[str, str]
    env: dict[str, str]  # what programs find, unless they are given another
    python: str  # their interpreter
    # Of a spawner that is root, for the zygote to give up; else there is nothing to give up.
    own_network: int = -1
    capabilities: int = 0


def run_child(start: Start, channel: int, report: int) -> NoReturn:
    """Be the child. It never returns into the code of its parent, whatever happens."""
    try:
        status = socket.socket(fileno=report)
        order = Order.read(status.recv(_MAX_ORDER))
        if status.recv(len(GO)) != GO:
            os._exit(1)  # it has no place
        try:
            slot, shape, identity, disk_bytes, _ = order
            with _steps(start, status).step("network"):
                if shape.network == "host" and start.own_network >= 0:
                    kernel.setns(start.own_network, kernel.CLONE_NEWNET)
            start.place.enter(slot, shape, identity, disk_bytes, _steps(start, status))
            _keep_only(channel, status.detach())
            status = socket.socket(fileno=_STATUS_FD)
            confine(
                slot,
                shape,
                identity,
                _steps(start, status),
                start.filters,
                lambda fd: _show_disk(status, fd),
            )
        except StepFailed as failed:
            status.send(json.dumps({"step": failed.step, "message": str(failed)}).encode())
            os._exit(1)
        os.dup2(0, 2)
        os.umask(_UMASK)
        status.send(b"ok")
        status.close()
        serve(_CHANNEL_FD, order.setup)
    except BaseException as error:  # noqa: BLE001  whatever it is, this process ends here
        with contextlib.suppress(OSError):
            os.write(2, f"child failed: {error!r}\n".encode())
    finally:
        os._exit(1)
    raise AssertionError("unreachable")


def _steps(start: Start, report: socket.socket) -> Steps:
    return Steps(start.failpoints, lambda step: _pause_at(report, step))


def _keep_only(channel: int, status: int) -> None:
    """Keep /dev/null, stderr until confined, channel and status socket; close all others."""
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
    kernel.send_fds(report, [b"disk"], [fd])


def _pause_at(report: socket.socket, step: str) -> None:
    """Pause at a failpoint: tell the spawner where we are, and wait for what it does about it."""
    report.send(json.dumps({"at": step}).encode())
    report.recv(8)
