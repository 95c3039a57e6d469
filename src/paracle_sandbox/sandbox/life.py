"""Make, connect, watch and remove one sandbox, and count who uses it now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ..audit import security_events
from ..audit.operations import log_failure, log_operation, log_refusal
from ..backends.base import Backend, Usage
from ..channel.connection import Connection
from ..errors import (
    ResourceLimitError,
    SandboxCleanupError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxPathError,
    SandboxTimeoutError,
)
from .command import CONFIRM_SECONDS
from .outcome import MIB, Counts, disk_breach, memory_alarm

if TYPE_CHECKING:
    from ..config import SandboxConfig
    from ..results import Stats


class Life:
    """The part of a sandbox that the others share: its connection, and who uses it now.

    It is what a command sees of its sandbox (command.CommandSandbox).
    """

    def __init__(
        self,
        backend: Backend,
        sandbox_id: str,
        config: SandboxConfig | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.sandbox_id = sandbox_id
        self.config = config if config is not None else _default_config(backend)
        self._labels = dict(labels or {})
        self._connection: Connection | None = None
        self._made = False
        self.in_use = 0
        self.last_used = time.monotonic()
        self.seen = Counts()
        self.last_usage: Usage | None = None
        self._cpu_mark = (0.0, 0.0)
        self._started_at = 0.0

    @property
    def is_running(self) -> bool:
        return self._connection is not None and self._connection.is_open

    # Life

    async def start(self) -> None:
        """Make it. On failure nothing is left behind. A second start is a no-op."""
        if self._made:
            return
        began = time.monotonic()
        try:
            await self._start(began)
        except BaseException as error:
            log_failure("not_created", self.sandbox_id, error, backend=self.backend.name)
            raise
        log_operation(
            "created",
            self.sandbox_id,
            backend=self.backend.name,
            seconds=round(self._started_at - began, 6),
            image=self.config.base_image,
            memory_mb=self.config.memory_mb,
            cpu_cores=self.config.cpu_cores,
            network_mode=self.config.network_mode,
        )

    async def _start(self, began: float) -> None:
        await self.backend.create(self.sandbox_id, self.config, self._labels)
        # What was used until now is counted or not; so is the time.
        counted_from = time.monotonic() if self.backend.counts_from_handover else began
        self._made = True
        try:
            channel = await self.backend.connect(self.sandbox_id)
            self._connection = Connection(channel, self.sandbox_id)
            await self._connection.start()
        except BaseException as error:
            await asyncio.shield(self._undo_start())
            if isinstance(error, OSError):
                raise SandboxCreationError(
                    f"Cannot connect to the guest: {error}", self.sandbox_id, step="connect"
                ) from error
            raise
        self.seen, self.last_usage = Counts(), None
        self._started_at = time.monotonic()
        self._cpu_mark = (counted_from, 0.0)
        self.touch()

    async def _undo_start(self) -> None:
        # Why it did not start matters more; the next sweep removes the rest.
        with suppress(SandboxError):
            await self.stop()

    async def stop(self) -> None:
        """Remove it with everything in it. Idempotent. Raises SandboxCleanupError when
        something stays; another stop tries again."""
        connection, self._connection = self._connection, None
        if connection is None:
            await self._destroy()
        elif self.backend.kills_guests:
            connection.lose()
            try:
                if self.in_use:
                    await asyncio.sleep(0)  # for them to see what was used, while that can be seen
                await self._destroy()
            finally:
                await connection.close()
        else:
            await connection.close()
            await self._destroy()

    async def _destroy(self) -> None:
        if not self._made:
            return
        seconds = self.config.cleanup_timeout
        try:
            async with asyncio.timeout(seconds):
                await self.backend.destroy(self.sandbox_id)
        except TimeoutError as error:
            late = SandboxCleanupError(
                f"The sandbox was not removed within {seconds} seconds", self.sandbox_id
            )
            log_failure("not_removed", self.sandbox_id, late)
            raise late from error
        except BaseException as error:
            log_failure("not_removed", self.sandbox_id, error)
            raise
        self._made = False
        lived = round(time.monotonic() - self._started_at, 6) if self._started_at else None
        log_operation("removed", self.sandbox_id, lived_seconds=lived)

    # For the parts

    def live(self) -> Connection:
        if self._connection is None:
            stopped = "The sandbox was stopped; make another"
            message = stopped if self._started_at else "Sandbox not started"
            raise SandboxExecutionError(message, self.sandbox_id)
        return self._connection

    def touch(self, change: int = 0) -> None:
        self.in_use += change
        self.last_used = time.monotonic()

    @asynccontextmanager
    async def operation(self) -> AsyncIterator[Connection]:
        """Bound one operation over the connection by the configuration's timeout, and put it on
        record."""
        connection = self.live()
        seconds = self.config.timeout_seconds
        self.touch(+1)
        try:
            async with asyncio.timeout(seconds) as deadline:
                with self._completing_errors():
                    yield connection
        except TimeoutError as error:
            if not deadline.expired():
                raise
            late = SandboxTimeoutError(
                f"The operation timed out after {seconds} seconds", self.sandbox_id, seconds
            )
            log_failure("timeout", self.sandbox_id, late)
            raise late from error
        except SandboxPathError:
            raise  # on record already, as a security event
        except SandboxError as error:
            log_refusal(self.sandbox_id, error)
            raise
        finally:
            self.touch(-1)

    @contextmanager
    def _completing_errors(self) -> Iterator[None]:
        """Complete the guest's errors with what only we know; record the escapes."""
        try:
            yield
        except SandboxPathError as error:
            self.record_escape(error.path or str(error))
            raise
        except ResourceLimitError as error:
            error.limit = error.limit or self.config.disk_mb * MIB
            # It was all in use when no more could be stored; what did not fit is gone by now.
            error.usage = error.usage or error.limit
            self.seen = replace(self.seen, disk_full=True)
            raise

    def record_escape(self, path: str) -> None:
        """Put on record that somebody named a path outside of the sandbox."""
        security_events.security_event("path_escape", sandbox_id=self.sandbox_id, path=path)

    # What it uses

    async def get_stats(self) -> Stats:
        self.live()
        usage = await self.backend.usage(self.sandbox_id)
        self._remember(usage)
        limit = self.config.memory_mb * MIB
        return {
            "cpu_percent": self._cpu_percent(usage),
            "cpu_seconds": usage.cpu_seconds,
            "memory_bytes": usage.memory_bytes,
            "memory_mb": usage.memory_bytes / MIB,
            "memory_percent": 100.0 * usage.memory_bytes / limit,
            "memory_limit_mb": self.config.memory_mb,
            "memory_peak_mb": usage.memory_peak_bytes / MIB,
            "disk_mb": usage.disk_bytes / MIB,
            "disk_limit_mb": self.config.disk_mb,
            "processes": usage.processes,
            "network_rx_bytes": usage.network_rx_bytes,
            "network_tx_bytes": usage.network_tx_bytes,
            "duration_seconds": time.monotonic() - self._started_at,
        }

    def _cpu_percent(self, usage: Usage) -> float:
        now = time.monotonic()
        before, cpu_before = self._cpu_mark
        self._cpu_mark = (now, usage.cpu_seconds)
        elapsed = now - before
        return max(0.0, 100.0 * (usage.cpu_seconds - cpu_before) / elapsed) if elapsed else 0.0

    async def check_limits(self) -> None:
        self.live()
        usage = await self.backend.usage(self.sandbox_id)
        if usage.disk_full:
            usage = await self.backend.exact_usage(self.sandbox_id)
        breach = memory_alarm(usage, self.config) or disk_breach(usage, self.config)
        if breach is not None:
            raise breach.error(self.sandbox_id)

    # For commands (command.CommandSandbox)

    async def look(self, *, exact: bool = False) -> Usage | None:
        """Return what it uses now; None when that cannot be read."""
        read = self.backend.exact_usage if exact else self.backend.usage
        try:
            usage = await read(self.sandbox_id)
        except (SandboxError, OSError):
            return None
        self._remember(usage)
        return usage

    def overlook(self) -> None:
        """Note that what was seen leaves out what a command did that has ended."""
        if not self.seen.stale:
            self.seen = replace(self.seen, stale=True)

    def _remember(self, usage: Usage) -> None:
        self.seen = self.seen.raised_to(usage)
        self.last_usage = usage

    async def kill_leftovers(self) -> None:
        """End what ended commands left behind; a sandbox in which that fails is destroyed."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                survivors = (await connection.call({"op": "kill_leftovers"})).get("survivors")
        except TimeoutError:
            survivors = True
        except SandboxError:
            survivors = connection.is_open  # an error is no confirmation
        if survivors:
            await self.condemn("something in it could not be killed")

    async def kill_programs(self) -> None:
        """Kill everything that runs in it; files stay, and it can be used again. Raises
        SandboxExecutionError when the guest could not kill all of it. It has no deadline of its
        own but the configuration's: a starved guest may take long."""
        async with self.operation() as connection:
            survivors = (await connection.call({"op": "kill_programs"})).get("survivors")
        if survivors:
            raise SandboxExecutionError("Some programs could not be killed", self.sandbox_id)

    async def condemn(self, reason: str) -> None:
        """Destroy the sandbox, because it does not do what it is told."""
        security_events.security_event("condemned", sandbox_id=self.sandbox_id, reason=reason)
        if self._connection is not None:
            await self._connection.close(reason)
        # The caller learns that its command was stopped; stop() can be tried again.
        with suppress(SandboxError):
            await self.stop()


def _default_config(backend: Backend) -> SandboxConfig:
    """Return the operator's configuration, which a sandbox of a manager would have, too."""
    from ..settings import load_settings

    return load_settings().default_config(backend.name)
