"""Sandboxes of remote clients: made and removed by request, used over a WebSocket.

The client runs the library, with its own Sandbox and Connection; the service makes the sandbox and
passes bytes between the WebSocket and the guest. It reads the client's requests to the guest, to
count executions against the user's quota and to log them with the limits that they reached. When
the WebSocket breaks, the lease waits for the client to come back and resume where it was; then the
sandbox is removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from ...backends.base import Usage
from ...config import SandboxConfig
from ...errors import SandboxError
from ...sandbox.outcome import Counts, verdict
from ..errors import Conflict, NotFound
from ..journal import Journal
from ..metrics import Metrics
from ..users.names import Names
from ..users.quotas import Executions
from ..users.user_sandboxes import LABEL, UserSandboxes, create_with_retry
from .relay import Relay

logger = logging.getLogger(__name__)

RESUME_SECONDS = 30.0
_LOOK_SECONDS = 5.0
_END_SECONDS = 30.0


@dataclass
class Lease:
    """One sandbox of a remote client. ``name`` is the backend's id for it."""

    user_id: str
    sandbox_id: str
    name: str
    config: SandboxConfig
    labels: Mapping[str, str]
    created_at: float = field(default_factory=time.time)
    relay: Relay | None = None
    ready: bool = False
    unheld_since: float = field(default_factory=time.monotonic)
    seen: Counts = field(default_factory=Counts)
    breached: str | None = None

    def is_abandoned(self, seconds: float) -> bool:
        """Whether no client has held its channel for so long."""
        if self.relay is not None and self.relay.is_held:
            return False
        since = self.relay.unheld_since if self.relay is not None else self.unheld_since
        return self.ready and time.monotonic() - since > seconds


class Leases:
    """The leases, by user and the id that the client chose."""

    def __init__(
        self,
        sandboxes: UserSandboxes,
        executions: Executions,
        names: Names,
        journal: Journal,
        metrics: Metrics,
        resume_seconds: float = RESUME_SECONDS,
    ) -> None:
        self._resume_seconds = resume_seconds
        self._sandboxes = sandboxes
        self._executions = executions
        self._names = names
        self._journal = journal
        self._metrics = metrics
        self._leases: dict[tuple[str, str], Lease] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    def user_of(self, name: str) -> str | None:
        return next((one.user_id for one in self._leases.values() if one.name == name), None)

    def get(self, user_id: str, sandbox_id: str) -> Lease:
        lease = self._leases.get((user_id, sandbox_id))
        if lease is None or not lease.ready:
            raise NotFound(f"Sandbox {sandbox_id} not found")
        return lease

    def count(self, user_id: str | None = None) -> int:
        """Count the leases of one user, or of all."""
        return sum(user_id in (None, user) for user, _ in self._leases)

    def all(self, user_id: str) -> list[Lease]:
        found = [one for (user, _), one in self._leases.items() if user == user_id and one.ready]
        return sorted(found, key=lambda one: one.created_at)

    async def create(
        self, user_id: str, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> Lease:
        """Raises Conflict, TooMany, Unavailable, SandboxCreationError."""
        if (user_id, sandbox_id) in self._leases:
            raise Conflict(f"Sandbox {sandbox_id} exists already")
        self._sandboxes.take_room(user_id, config)
        name = self._names.own_sandbox(user_id, sandbox_id)
        lease = Lease(user_id, sandbox_id, name, config, dict(labels))
        self._leases[user_id, sandbox_id] = lease
        backend = self._sandboxes.backend
        try:
            # The client's labels stay here: on the backend they could be the labels by which
            # another program on this machine finds its own sandboxes.
            await create_with_retry(
                lambda: backend.create(name, config, {LABEL: self._names.installation})
            )
        except BaseException as error:
            self._forget(lease)
            self._sandboxes.report_failure(user_id, error)
            raise
        lease.ready = True
        if self._sandboxes.is_closed:
            await self.remove(user_id, sandbox_id, "shutdown")
            self._sandboxes.refuse_when_closed()
        lease.unheld_since = time.monotonic()
        self._metrics.creations.labels("ok").inc()
        self._journal.record("create", user=user_id, sandbox_id=name, outcome="ok")
        return lease

    async def relay(self, lease: Lease) -> Relay:
        """Return the relay to its guest, made at the first request."""
        if lease.relay is None:
            channel = await self._sandboxes.backend.connect(lease.name)
            if lease.relay is not None or not lease.ready:  # meanwhile: by another, or removed
                await channel.close()
                return (await self.relay(lease)) if lease.ready else self._gone(lease)
            lease.relay = Relay(
                channel, lease.user_id, lease.name, self._executions, self._journal, self._metrics,
                partial(self._look_soon, lease),
            )  # fmt: skip
            lease.relay.start()
        return lease.relay

    def _gone(self, lease: Lease) -> NoReturn:
        raise NotFound(f"Sandbox {lease.sandbox_id} not found")

    async def usage(self, lease: Lease) -> Usage:
        usage = await self._sandboxes.backend.usage(lease.name)
        breach = verdict(usage, lease.seen, lease.config, failed=True)
        before, lease.seen = lease.seen, lease.seen.raised_to(usage)
        # Each count is one breach. A full disk stays full, and is logged once.
        if breach is not None and (lease.seen != before or breach.resource_type != lease.breached):
            self._journal.security_event("limit", lease.name, {"error": breach.message})
        lease.breached = breach.resource_type if breach is not None else None
        return usage

    def _look_soon(self, lease: Lease) -> None:
        """Read its figures soon, because a program in it failed."""
        self._begin(self._look(lease))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task of its own, which close() ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, lease: Lease) -> None:
        with suppress(SandboxError, OSError):  # it may be gone by now
            await self.usage(lease)

    async def remove(self, user_id: str, sandbox_id: str, reason: str = "request") -> bool:
        """Remove a lease. Returns whether there was one. Raises SandboxCleanupError; it can then be
        tried again."""
        lease = self._leases.get((user_id, sandbox_id))
        if lease is None or not lease.ready:
            return False
        lease.ready = False
        try:
            if lease.relay is not None:
                await lease.relay.close()
            await self._sandboxes.backend.destroy(lease.name)
        except BaseException:
            lease.ready = True
            raise
        self._forget(lease)
        self._metrics.removals.labels(reason).inc()
        self._journal.record("destroy", user=user_id, sandbox_id=lease.name, reason=reason)
        return True

    def _forget(self, lease: Lease) -> None:
        if self._leases.pop((lease.user_id, lease.sandbox_id), None) is not None:
            self._sandboxes.leave_room(lease.user_id, lease.config)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._resume_seconds / 2))
            for lease in list(self._leases.values()):
                if lease.is_abandoned(self._resume_seconds):
                    logger.info("Removing sandbox %s, whose client went away", lease.name)
                    self._begin(self._remove_abandoned(lease))
            self._executions.forget_quiet()

    async def _remove_abandoned(self, lease: Lease) -> None:
        try:
            await self.remove(lease.user_id, lease.sandbox_id, "abandoned")
        except (SandboxError, OSError) as error:  # the next look tries again
            logger.error("Sandbox %s was not removed: %s", lease.name, error)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        await asyncio.gather(
            *(self.remove(one.user_id, one.sandbox_id, "shutdown")
              for one in list(self._leases.values())),
            return_exceptions=True,
        )  # fmt: skip
        if self._tasks:  # some of them remove what was abandoned
            _, late = await asyncio.wait(self._tasks, timeout=_END_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
