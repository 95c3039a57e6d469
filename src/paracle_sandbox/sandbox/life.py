"""The life of a sandbox: made, connected, used, removed; and who is using it now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

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
from .outcome import MIB, Counts
from .paths import AnyPath, checked_path, own_places, path_text

if TYPE_CHECKING:
    from ..config import SandboxConfig


class SandboxLife:
    """Start, stop and the bookkeeping of operations; Sandbox adds what can be done with it."""

    def __init__(
        self,
        backend: Backend,
        sandbox_id: str,
        config: SandboxConfig | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._sandbox_id = sandbox_id
        self._config = config if config is not None else _usual(backend)
        self._places = own_places(self._config)
        self._labels = dict(labels or {})
        self._connection: Connection | None = None
        self._made = False
        self._in_use = 0
        self._last_used = time.monotonic()
        self._seen = Counts()
        self._last_usage: Usage | None = None
        self._cpu_mark = (0.0, 0.0)
        self._started_at = 0.0

    @property
    def sandbox_id(self) -> str:
        return self._sandbox_id

    @property
    def id(self) -> str:
        return self._sandbox_id

    @property
    def config(self) -> SandboxConfig:
        return self._config

    @property
    def is_running(self) -> bool:
        """Started, not stopped, and its guest still answers."""
        return self._connection is not None and self._connection.is_open

    @property
    def last_used(self) -> float:
        """time.monotonic() of the last beginning or end of an operation."""
        return self._last_used

    @property
    def last_usage(self) -> Usage | None:
        """What it used when somebody last looked; None if nobody has."""
        return self._last_usage

    @property
    def in_use(self) -> int:
        """How many operations run now, background commands included."""
        return self._in_use

    # Life

    async def start(self) -> None:
        """Make it. On failure nothing is left behind. A second start is a no-op."""
        if self._made:
            return
        began = time.monotonic()
        try:
            await self._start(began)
        except BaseException as error:
            log_failure("not_created", self._sandbox_id, error, backend=self._backend.name)
            raise
        log_operation(
            "created",
            self._sandbox_id,
            backend=self._backend.name,
            seconds=round(self._started_at - began, 6),
            image=self._config.base_image,
            memory_mb=self._config.memory_mb,
            cpu_cores=self._config.cpu_cores,
            network_mode=self._config.network_mode,
        )

    async def _start(self, began: float) -> None:
        await self._backend.create(self._sandbox_id, self._config, self._labels)
        # What was used until now is counted or not; so is the time.
        counted_from = time.monotonic() if self._backend.counts_from_handover else began
        self._made = True
        try:
            channel = await self._backend.connect(self._sandbox_id)
            self._connection = Connection(channel, self._sandbox_id)
            await self._connection.start()
        except BaseException as error:
            await asyncio.shield(self._undo_start())
            if isinstance(error, OSError):
                raise SandboxCreationError(
                    f"Cannot connect to the guest: {error}", self._sandbox_id, step="connect"
                ) from error
            raise
        self._seen, self._last_usage = Counts(), None
        self._started_at = time.monotonic()
        self._cpu_mark = (counted_from, 0.0)
        self._touch()

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
        elif self._backend.kills_guests:
            connection.lose()
            try:
                if self._in_use:
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
        seconds = self._config.cleanup_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._backend.destroy(self._sandbox_id)
        except TimeoutError as error:
            late = SandboxCleanupError(
                f"The sandbox was not removed within {seconds} seconds", self._sandbox_id
            )
            log_failure("not_removed", self._sandbox_id, late)
            raise late from error
        except BaseException as error:
            log_failure("not_removed", self._sandbox_id, error)
            raise
        self._made = False
        lived = round(time.monotonic() - self._started_at, 6) if self._started_at else None
        log_operation("removed", self._sandbox_id, lived_seconds=lived)

    async def cleanup(self) -> None:
        """stop(), by another name."""
        await self.stop()

    async def close(self) -> None:
        """stop(), by another name."""
        await self.stop()

    def context(self) -> Self:
        """``async with sandbox.context()`` is ``async with sandbox``."""
        return self

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    # For the parts above

    def _live(self) -> Connection:
        if self._connection is None:
            stopped = "The sandbox was stopped; make another"
            message = stopped if self._started_at else "Sandbox not started"
            raise SandboxExecutionError(message, self._sandbox_id)
        return self._connection

    def _touch(self, change: int = 0) -> None:
        self._in_use += change
        self._last_used = time.monotonic()

    @asynccontextmanager
    async def _operation(self) -> AsyncIterator[Connection]:
        """One operation of bounded length over the connection."""
        connection = self._live()
        seconds = self._config.timeout_seconds
        self._touch(+1)
        try:
            async with asyncio.timeout(seconds) as deadline:
                with self._explained():
                    yield connection
        except TimeoutError as error:
            if not deadline.expired():
                raise
            late = SandboxTimeoutError(
                f"The operation timed out after {seconds} seconds", self._sandbox_id, seconds
            )
            log_failure("timeout", self._sandbox_id, late)
            raise late from error
        except SandboxPathError:
            raise  # on record already, as a security event
        except SandboxError as error:
            log_refusal(self._sandbox_id, error)
            raise
        finally:
            self._touch(-1)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Complete the guest's errors with what only we know; record the escapes."""
        try:
            yield
        except SandboxPathError as error:
            path = error.path or str(error)
            security_events.security_event("path_escape", sandbox_id=self._sandbox_id, path=path)
            raise
        except ResourceLimitError as error:
            error.limit = error.limit or self._config.disk_mb * MIB
            # It was all in use when no more could be stored; what did not fit is gone by now.
            error.usage = error.usage or error.limit
            self._seen = replace(self._seen, disk_full=True)
            raise

    def _checked(self, path: AnyPath) -> str:
        text = path_text(path, self._sandbox_id)
        try:
            return checked_path(text, self._places, self._sandbox_id)
        except SandboxPathError:
            security_events.security_event("path_escape", sandbox_id=self._sandbox_id, path=text)
            raise

    # For commands (command.Place)

    async def look(self, *, exact: bool = False) -> Usage | None:
        """What it uses now; None when nobody can say."""
        read = self._backend.exact_usage if exact else self._backend.usage
        try:
            usage = await read(self._sandbox_id)
        except (SandboxError, OSError):
            return None
        self._saw(usage)
        return usage

    def overlook(self) -> None:
        """What a command that has ended met is not in what was seen."""
        if not self._seen.stale:
            self._seen = replace(self._seen, stale=True)

    def _saw(self, usage: Usage) -> None:
        self._seen = self._seen.raised_to(usage)
        self._last_usage = usage

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
        async with self._operation() as connection:
            survivors = (await connection.call({"op": "kill_programs"})).get("survivors")
        if survivors:
            raise SandboxExecutionError("Some programs could not be killed", self._sandbox_id)

    async def condemn(self, reason: str) -> None:
        """Destroy it: it does not do what it is told."""
        security_events.security_event("condemned", sandbox_id=self._sandbox_id, reason=reason)
        if self._connection is not None:
            await self._connection.close(reason)
        # The caller learns that its command was stopped; stop() can be tried again.
        with suppress(SandboxError):
            await self.stop()


def _usual(backend: Backend) -> SandboxConfig:
    """The operator's, as of a sandbox that a manager makes."""
    from ..settings import load_settings

    return load_settings().default_config(backend.name)
