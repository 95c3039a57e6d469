"""Whose sandbox is whose: each client has its own, and they end with it.

A client is one stdio process, or one session over HTTP. Clients of the newer protocol have no
session: a tool call of theirs has a sandbox for its own length, unless they made one with
create_sandbox and name it; its name is a secret of 128 bits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

from ..client import LocalSandboxClient
from ..config import SandboxConfig
from ..errors import SandboxError
from ..manager import SandboxManager
from ..tools import PythonExecute, Tool, Toolbox, sandbox_tools
from ..tools.arguments import ArgumentFault

logger = logging.getLogger(__name__)

MAIN = "main"
MAX_PER_CLIENT = 10


class PythonSessionTool(PythonExecute):
    """PythonExecute that remembers, under a name of its own beside the one that does not."""

    name = "python_session"


class Place:
    """One sandbox with its tools; the sandbox is made when a tool needs it."""

    def __init__(self, manager: SandboxManager, config: SandboxConfig) -> None:
        self.client = LocalSandboxClient(manager, config)
        self.tools = Toolbox(place_tools(self.client))

    async def close(self) -> None:
        with suppress(SandboxError):  # the manager tries again when it closes
            await self.tools.close()
            await self.client.cleanup()


def place_tools(client: LocalSandboxClient) -> list[Tool]:
    python, *others = sandbox_tools(client)
    return [python, PythonSessionTool(client, stateful=True), *others]


class Holder:
    """The sandboxes of one client, by name."""

    def __init__(self, new_place: Callable[[], Place]) -> None:
        self._new_place = new_place
        self.places: dict[str, Place] = {}

    def place(self, name: str | None) -> Place:
        """Raises ArgumentFault for a name that was never given out."""
        if name is None or name in ("", MAIN):
            return self.places.get(MAIN) or self.add(MAIN)
        if name not in self.places:
            known = ", ".join(self.places) or "none"
            raise ArgumentFault(f"There is no sandbox {name!r}; there are: {known}.")
        return self.places[name]

    def add(self, name: str) -> Place:
        if len(self.places) >= MAX_PER_CLIENT:
            raise ArgumentFault(f"You have {MAX_PER_CLIENT} sandboxes already; destroy one first.")
        self.places[name] = self._new_place()
        return self.places[name]

    def free_name(self) -> str:
        """The first that no sandbox has: after one is destroyed, their count is somebody's name."""
        return next(name for n in count(1) if (name := f"sandbox-{n}") not in self.places)

    async def destroy(self, name: str) -> bool:
        place = self.places.pop(name, None)
        if place is not None:
            await place.close()
        return place is not None

    async def close(self) -> None:
        places, self.places = list(self.places.values()), {}
        await asyncio.gather(*(place.close() for place in places))


class Places:
    """Every client's sandboxes, over one manager."""

    def __init__(
        self, manager: SandboxManager, config: SandboxConfig, *, linger_seconds: float = 900.0
    ) -> None:
        self.manager = manager
        self._config = config
        self._linger_seconds = linger_seconds
        self._holders: dict[str, Holder] = {}
        # Those of clients without a session, each by its secret name.
        self._nobodys = Holder(self._new_place)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[object]] = set()

    def holder(self, client: str) -> Holder:
        """The sandboxes of a client that can be told from others."""
        if client not in self._holders:
            self._holders[client] = Holder(self._new_place)
        return self._holders[client]

    def _new_place(self) -> Place:
        return Place(self.manager, self._config)

    @asynccontextmanager
    async def opened(self, client: str | None, name: str | None) -> AsyncIterator[Place]:
        """The place that a tool call is meant for. Raises ArgumentFault."""
        if client is not None:
            yield self.holder(client).place(name)
        elif name is None or name in ("", MAIN):
            place = self._new_place()
            try:
                yield place
            finally:
                await place.close()
        else:
            place = self._nobodys.place(name)
            self._stop_timer(name)
            try:
                yield place
            finally:
                self._start_timer(name, self._linger_seconds, self._nobodys.destroy)

    async def create(self, client: str | None, name: str | None) -> str:
        """A new sandbox for a client, made now; its name. Raises ArgumentFault, and SandboxError
        when it cannot be made, with nothing left of it."""
        holder = self._nobodys if client is None else self.holder(client)
        chosen = secrets.token_hex(16) if client is None else name or holder.free_name()
        if chosen in holder.places:
            raise ArgumentFault(f"There is a sandbox {chosen!r} already.")
        place = holder.add(chosen)
        try:
            await place.client.sandbox()
        except BaseException:
            await holder.destroy(chosen)
            raise
        if client is None:
            self._start_timer(chosen, self._linger_seconds, self._nobodys.destroy)
        return chosen

    async def destroy(self, client: str | None, name: str) -> bool:
        if client is not None:
            return await self.holder(client).destroy(name)
        self._stop_timer(name)
        return await self._nobodys.destroy(name)

    def names(self, client: str | None) -> dict[str, str | None]:
        """A client's sandboxes, and the ids of those that exist already."""
        places = {} if client is None else self.holder(client).places
        return {name: place.client.sandbox_id for name, place in places.items()}

    # The end of a client

    async def end(self, client: str) -> None:
        self._stop_timer(client)
        holder = self._holders.pop(client, None)
        if holder is not None:
            await holder.close()

    def end_later(self, client: str, seconds: float | None = None) -> bool:
        """End it unless stay() comes before; whether there is anything to end."""
        wait = self._linger_seconds if seconds is None else seconds
        if client in self._holders:
            self._start_timer(client, wait, self.end)
        return client in self._holders

    def stay(self, client: str) -> None:
        self._stop_timer(client)

    def _start_timer(
        self, name: str, seconds: float, end: Callable[[str], Coroutine[Any, Any, object]]
    ) -> None:
        self._stop_timer(name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, self._time_is_up, name, end)

    def _stop_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _time_is_up(self, name: str, end: Callable[[str], Coroutine[Any, Any, object]]) -> None:
        del self._timers[name]
        logger.info("A client is gone, or has not been heard of; its sandbox goes with it")
        task = asyncio.get_running_loop().create_task(end(name))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        for client in list(self._holders):
            await self.end(client)
        await self._nobodys.close()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.manager.close()
