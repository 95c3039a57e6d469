"""Whose sandbox is whose: each client has its own, and they end with it.

A client is one stdio process, or one session over HTTP. Clients of the newer protocol have no
session: a tool call of theirs has a sandbox for its own length, unless they made one with
create_sandbox and name it. That name is a secret of 128 bits: no answer to anybody else contains
it, and it opens the sandbox only together with the key that the sandbox was made with.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Client:
    """Who calls a tool: a session, or without one a key and an address. The transport fills it in
    from what it has checked, never from what a request says about itself."""

    session: str | None = None
    key: str = ""
    address: str = ""


class PythonSessionTool(PythonExecute):
    """PythonExecute that remembers, under a name of its own beside the one that does not."""

    name = "python_session"


class Place:
    """One sandbox with its tools; the sandbox is made when a tool needs it."""

    def __init__(self, manager: SandboxManager, config: SandboxConfig, address: str = "") -> None:
        self.address = address  # of the client that it was made for
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
    """The sandboxes of one session, or of the clients with one key and without a session."""

    def __init__(self, new_place: Callable[[str], Place], *, names_are_secret: bool) -> None:
        self._new_place = new_place
        self._names_are_secret = names_are_secret
        self.places: dict[str, Place] = {}

    def place(self, name: str | None) -> Place:
        """Raises ArgumentFault for a name that was never given out."""
        if not self._names_are_secret and (name is None or name in ("", MAIN)):
            return self.places.get(MAIN) or self.add(MAIN)
        if name is None or name not in self.places:
            raise ArgumentFault(f"There is no sandbox {name!r}{self._advice()}")
        return self.places[name]

    def _advice(self) -> str:
        """What to do about a name that is unknown. A secret name is never part of it: whoever
        reads it may be another client."""
        if self._names_are_secret:
            return ". create_sandbox makes one, and answers with its name."
        return f"; there are: {', '.join(self.places) or 'none'}."

    def add(self, name: str, address: str = "") -> Place:
        held = sum(place.address == address for place in self.places.values())
        if held >= MAX_PER_CLIENT:
            raise ArgumentFault(f"You have {MAX_PER_CLIENT} sandboxes already; destroy one first.")
        self.places[name] = self._new_place(address)
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
        self._sessions: dict[str, Holder] = {}
        # Those of clients without a session, by key.
        self._sessionless: dict[str, Holder] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[object]] = set()

    def _holder(self, client: Client) -> Holder:
        holders = self._sessionless if client.session is None else self._sessions
        name = client.key if client.session is None else client.session
        if name not in holders:
            holders[name] = Holder(self._new_place, names_are_secret=client.session is None)
        return holders[name]

    def _new_place(self, address: str) -> Place:
        return Place(self.manager, self._config, address)

    @asynccontextmanager
    async def opened(self, client: Client, name: str | None) -> AsyncIterator[Place]:
        """The place that a tool call is meant for. Raises ArgumentFault."""
        if client.session is not None:
            yield self._holder(client).place(name)
        elif name is None or name in ("", MAIN):
            place = self._new_place(client.address)
            try:
                yield place
            finally:
                await place.close()
        else:
            place = self._holder(client).place(name)
            self._stop_timer(client.key, name)
            try:
                yield place
            finally:
                self._remove_later(client, name)

    async def create(self, client: Client, name: str | None) -> str:
        """A new sandbox for a client, made now; its name. Raises ArgumentFault, and SandboxError
        when it cannot be made, with nothing left of it."""
        holder = self._holder(client)
        has_session = client.session is not None
        chosen = (name or holder.free_name()) if has_session else secrets.token_hex(16)
        if chosen in holder.places:
            raise ArgumentFault(f"There is a sandbox {chosen!r} already.")
        place = holder.add(chosen, "" if has_session else client.address)
        try:
            await place.client.sandbox()
        except BaseException:
            await holder.destroy(chosen)
            raise
        if not has_session:
            self._remove_later(client, chosen)
        return chosen

    async def destroy(self, client: Client, name: str) -> bool:
        if client.session is None:
            self._stop_timer(client.key, name)
        return await self._holder(client).destroy(name)

    def names(self, client: Client) -> dict[str, str | None]:
        """The sandboxes of a session, and the ids of those that exist already. None for a client
        without a session: it cannot be told from others, and the names are secrets."""
        if client.session not in self._sessions:
            return {}
        places = self._sessions[client.session].places
        return {name: place.client.sandbox_id for name, place in places.items()}

    def _remove_later(self, client: Client, name: str) -> None:
        """Remove a sandbox that was made without a session, unless it is used before."""
        holder = self._holder(client)
        if name in holder.places:
            end = functools.partial(holder.destroy, name)
            self._start_timer((client.key, name), self._linger_seconds, end)

    # The end of a session

    async def end(self, session: str) -> None:
        self._stop_timer("", session)
        holder = self._sessions.pop(session, None)
        if holder is not None:
            await holder.close()

    def end_later(self, session: str, seconds: float | None = None) -> None:
        """End it unless stay() comes before."""
        wait = self._linger_seconds if seconds is None else seconds
        if session in self._sessions:
            self._start_timer(("", session), wait, functools.partial(self.end, session))

    def stay(self, session: str) -> None:
        self._stop_timer("", session)

    def _start_timer(
        self,
        name: tuple[str, str],
        seconds: float,
        end: Callable[[], Coroutine[Any, Any, object]],
    ) -> None:
        self._stop_timer(*name)
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, self._time_is_up, name, end)

    def _stop_timer(self, *name: str) -> None:
        timer = self._timers.pop((name[0], name[1]), None)
        if timer is not None:
            timer.cancel()

    def _time_is_up(
        self, name: tuple[str, str], end: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        del self._timers[name]
        logger.info("A client is gone, or has not been heard of; its sandbox goes with it")
        task = asyncio.get_running_loop().create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for name in list(self._timers):
            self._stop_timer(*name)
        for session in list(self._sessions):
            await self.end(session)
        for holder in self._sessionless.values():
            await holder.close()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.manager.close()
