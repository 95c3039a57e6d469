"""Whether sandboxes can be made now.

The backend is examined when the service starts, while it is not ready, and when a sandbox could
not be made. An examination makes a sandbox. While all is well the backend is only asked for a
sandbox that does not exist, which shows for next to nothing that the engine answers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ..backends.base import Backend, Health
from ..errors import SandboxError, SandboxNotFoundError

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
LOOK_SECONDS = 30.0
_ANSWER_SECONDS = 10.0


class Readiness:
    """Watches the backend. Before it is ready for the first time, ``take_over`` and then ``prove``,
    which makes a sandbox as users get them, have to succeed. The service answers meanwhile."""

    def __init__(
        self,
        backend: Backend,
        take_over: Callable[[], Awaitable[None]],
        pause_seconds: float = PAUSE_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        prove: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.is_ready = False
        self.health: Health | None = None
        self._backend = backend
        self._take_over = take_over
        self._pause_seconds = pause_seconds
        self._look_seconds = look_seconds
        self._prove = prove
        self._doubt = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        fault = await self._examine()
        if self._prove is None:
            self._say(fault)
        self._watcher = asyncio.create_task(self._watch(fault))

    def doubt(self) -> None:
        """Have the backend examined soon, because a sandbox could not be made."""
        self._doubt.set()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        self.is_ready = False

    async def _watch(self, fault: str) -> None:
        if self._prove is not None:
            await self._safely(self._conclude(fault))
        while True:
            await asyncio.sleep(self._pause_seconds)  # also when many cannot be made
            if self.is_ready:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._look_seconds):
                        await self._doubt.wait()
            await self._safely(self._look())

    async def _safely(self, look: Awaitable[None]) -> None:
        try:
            await look
        except Exception:  # whatever it is, the next look may find the backend well
            logger.exception("Looking after the %s backend failed", self._backend.name)

    async def _look(self) -> None:
        is_doubtful = self._doubt.is_set() or not self.is_ready
        self._doubt.clear()
        fault = await self._silence()
        if fault:
            self._say(fault)
        elif is_doubtful:
            await self._conclude(await self._examine())

    async def _silence(self) -> str:
        """Return why the backend does not answer; empty if it does."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._backend.usage(f"none-{secrets.token_hex(8)}")
        except SandboxNotFoundError:
            return ""
        except TimeoutError:
            return f"it did not answer within {_ANSWER_SECONDS:g} seconds"
        except (SandboxError, OSError) as error:
            return str(error) or type(error).__name__
        return ""

    async def _examine(self) -> str:
        """Return why sandboxes cannot be made; empty if they can."""
        self.health = await self._backend.health()
        fault = "" if self.health.available else self.health.detail or "it is not available"
        try:
            await self._take_over()
        except SandboxError as error:
            fault = fault or error.message
        return fault

    async def _conclude(self, fault: str) -> None:
        if not fault and self._prove is not None:
            try:
                await self._prove()
                self._prove = None
            except SandboxError as error:
                fault = error.message
                logger.error("No sandbox can be made: %s", fault)
        self._say(fault)

    def _say(self, fault: str) -> None:
        was_ready, self.is_ready = self.is_ready, not fault
        if was_ready and fault:
            logger.error("The %s backend makes no sandboxes: %s", self._backend.name, fault)
        elif self.is_ready and not was_ready:
            logger.info("The %s backend is ready", self._backend.name)
