"""Learns how containers ended from the engine's events, because the engine removes containers at
once.

Each backend opens one connection, with its first sandbox. When the engine itself died, a death has
no cause.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from ...errors import SandboxError
from .engine import Engine
from .labels import SESSION

# The engine hears of an end and of memory that ran out on two ways: either may come first.
_OOM_SECONDS = 0.5


@dataclass
class Death:
    """The engine's events about the end of a container, so far."""

    exit_code: int | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)
    oom_told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def oom(self) -> bool:
        return self.oom_told.is_set()


class Watch:
    """Watches for the deaths of one session's containers."""

    def __init__(self, engine: Engine, session: str) -> None:
        self._engine = engine
        self._session = session
        self._deaths: dict[str, Death] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, container: str) -> None:
        """Listen for the end of a container, before it is started."""
        self._deaths[container] = Death()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen())

    def end(self, container: str) -> None:
        self._deaths.pop(container, None)

    async def cause(self, container: str, seconds: float) -> Death:
        """Return how it ended, as soon as that is known; a death without a cause when it is not."""
        death = self._deaths.get(container, Death())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(death.known.wait(), seconds)
            if death.exit_code:
                await asyncio.wait_for(death.oom_told.wait(), _OOM_SECONDS)
        return death

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _listen(self) -> None:
        filters = {
            "type": ["container"],
            "event": ["oom", "die"],
            "label": [f"{SESSION}={self._session}"],
        }
        try:
            with contextlib.suppress(SandboxError):
                async for event in self._engine.events(filters):
                    self._note(event)
        except asyncio.CancelledError:
            # We are being closed, or the event loop ends and nobody closed us: so that a program
            # that forgets to is not told of connections it knows nothing of.
            await self._engine.close()
            raise
        for death in self._deaths.values():
            death.known.set()

    def _note(self, event: dict[str, object]) -> None:
        actor = event.get("Actor")
        if not isinstance(actor, dict):
            return
        death = self._deaths.get(str(actor.get("ID")))
        if death is None:
            return
        if event.get("Action") == "oom":
            death.oom_told.set()
        else:
            code = str((actor.get("Attributes") or {}).get("exitCode", ""))
            death.exit_code = int(code) if code.isdecimal() else None
            death.known.set()
