"""One forked child on its way to being a sandbox, as its spawner sees it (`first_process`: itself).

spawner: have it forked ─ make its groups ─ "go" ─────────────── "ok" ─ park, or hand over ─ kill
child:                                       └── enter, confine ──┴── serve as the guest ...
"""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any

from . import kernel
from .limits.sandbox_resources import Grant
from .shape import Identity, Shape

GO = b"go"


class Child:
    """The spawner's view of one child."""

    def __init__(self, slot: str, shape: Shape, identity: Identity, grant: Grant) -> None:
        self.slot = slot
        self.shape = shape
        self.identity = identity
        self.grant = grant
        self.pid = 0
        self.pidfd = -1
        self.status: socket.socket | None = None
        self.host_end: socket.socket | None = None
        self.disk_fd = -1
        self.process: dict[str, int] | None = None  # as others see it, once it is parked
        self.state = "starting"  # starting, parked, running, dying
        self.request: dict[str, Any] | None = None
        self.waiters: list[int] = []
        self.failure: dict[str, Any] | None = None
        self.left = ""  # what could not be removed when it had ended

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def is_gone(self) -> bool:
        """It has ended, or was never there, and its number is free."""
        try:
            if self.pidfd >= 0:
                kernel.send_signal(self.pidfd, 0)
                return False
        except ProcessLookupError:
            pass
        return True

    def order(self, setup: dict[str, Any]) -> bytes:
        """Encode what the child needs to know itself."""
        told = self.slot, self.shape, self.identity, self.grant.disk_bytes, setup
        return json.dumps(told).encode()

    def hang_up(self) -> None:
        """Close both sockets. A process that waits for "go" ends then, whoever knows its pid."""
        for sock in (self.status, self.host_end):
            if sock is not None:
                sock.close()
        self.status = self.host_end = None

    def close(self) -> None:
        self.hang_up()
        for fd in (self.pidfd, self.disk_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.disk_fd = -1
