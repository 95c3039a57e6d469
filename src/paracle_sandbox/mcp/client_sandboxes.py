"""MCP clients and their sandboxes: a policy over SandboxManager.

The manager makes, counts and removes the sandboxes. This module knows which client has which, and
removes them when their client is gone. A client is one stdio process, or one session over HTTP.
Clients of the newer protocol have no session: each tool call has a sandbox of its own, unless the
client made one with create_sandbox and names it. That name is a secret of 128 bits: only the answer
to its maker contains it, and it works only with the key that the sandbox was made with.
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
    """The client of a tool call: a session, or without one a key and an address. The transport
    fills it in from what it has checked, never from claims of the request."""

    session: str | None = None
    key: str = ""
    address: str = ""


class PythonSessionTool(PythonExecute):
    """PythonExecute that keeps variables, under a name of its own beside the one that does not."""

    name = "python_session"


class ToolSandbox:
    """One sandbox with its tools; the sandbox is made when a tool needs it."""

    def __init__(self, manager: SandboxManager, config: SandboxConfig, address: str = "") -> None:
        self.address = address  # of the client that it was made for
        self.client = LocalSandboxClient(manager, config)
        self.tools = Toolbox(sandbox_toolset(self.client))

    async def close(self) -> None:
        with suppress(SandboxError):  # the manager tries again when it closes
            await self.tools.close()
            await self.client.cleanup()


def sandbox_toolset(client: LocalSandboxClient) -> list[Tool]:
    python, *others = sandbox_tools(client)
    return [python, PythonSessionTool(client, stateful=True), *others]


class SandboxGroup:
    """The sandboxes of one session, or of the clients with one key and without a session."""

    def __init__(
        self, new_sandbox: Callable[[str], ToolSandbox], *, names_are_secret: bool
    ) -> None:
        self._new_sandbox = new_sandbox
        self._names_are_secret = names_are_secret
        self.sandboxes: dict[str, ToolSandbox] = {}

    def sandbox(self, name: str | None) -> ToolSandbox:
        """Raises ArgumentFault for a name that was never given out."""
        if not self._names_are_secret and (name is None or name in ("", MAIN)):
            return self.sandboxes.get(MAIN) or self.add(MAIN)
        if name is None or name not in self.sandboxes:
            raise ArgumentFault(f"There is no sandbox {name!r}{self._advice()}")
        return self.sandboxes[name]

    def _advice(self) -> str:
        """Say what to do about an unknown name, without any secret name: the reader may be another
        client."""
        if self._names_are_secret:
            return ". create_sandbox makes one, and answers with its name."
        return f"; there are: {', '.join(self.sandboxes) or 'none'}."

    def add(self, name: str, address: str = "") -> ToolSandbox:
        held = sum(sandbox.address == address for sandbox in self.sandboxes.values())
        if held >= MAX_PER_CLIENT:
            raise ArgumentFault(f"You have {MAX_PER_CLIENT} sandboxes already; destroy one first.")
        self.sandboxes[name] = self._new_sandbox(address)
        return self.sandboxes[name]

    def free_name(self) -> str:
        """Return the first number that is free: after a removal, the count may be a name in use."""
        return next(name for n in count(1) if (name := f"sandbox-{n}") not in self.sandboxes)

    async def destroy(self, name: str) -> bool:
        sandbox = self.sandboxes.pop(name, None)
        if sandbox is not None:
            await sandbox.close()
        return sandbox is not None

    async def close(self) -> None:
        sandboxes, self.sandboxes = list(self.sandboxes.values()), {}
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


class ClientSandboxes:
    """The sandboxes of all clients, over one manager."""

    def __init__(
        self, manager: SandboxManager, config: SandboxConfig, *, linger_seconds: float = 900.0
    ) -> None:
        self.manager = manager
        self._config = config
        self._linger_seconds = linger_seconds
        self._sessions: dict[str, SandboxGroup] = {}
        # The groups of clients without a session, by key.
        self._sessionless: dict[str, SandboxGroup] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[object]] = set()

    def _group(self, client: Client) -> SandboxGroup:
        groups = self._sessionless if client.session is None else self._sessions
        name = client.key if client.session is None else client.session
        if name not in groups:
            groups[name] = SandboxGroup(self._new_sandbox, names_are_secret=client.session is None)
        return groups[name]

    def _new_sandbox(self, address: str) -> ToolSandbox:
        return ToolSandbox(self.manager, self._config, address)

    @asynccontextmanager
    async def using(self, client: Client, name: str | None) -> AsyncIterator[ToolSandbox]:
        """The sandbox that a tool call is meant for. Raises ArgumentFault."""
        if client.session is not None:
            yield self._group(client).sandbox(name)
        elif name is None or name in ("", MAIN):
            sandbox = self._new_sandbox(client.address)
            try:
                yield sandbox
            finally:
                await sandbox.close()
        else:
            sandbox = self._group(client).sandbox(name)
            self._stop_timer(client.key, name)
            try:
                yield sandbox
            finally:
                self._remove_later(client, name)

    async def create(self, client: Client, name: str | None) -> str:
        """Make a sandbox for a client now, and return its name. Raises ArgumentFault, and
        SandboxError when it cannot be made, with nothing left of it."""
        group = self._group(client)
        has_session = client.session is not None
        chosen = (name or group.free_name()) if has_session else secrets.token_hex(16)
        if chosen in group.sandboxes:
            raise ArgumentFault(f"There is a sandbox {chosen!r} already.")
        sandbox = group.add(chosen, "" if has_session else client.address)
        try:
            await sandbox.client.sandbox()
        except BaseException:
            await group.destroy(chosen)
            raise
        if not has_session:
            self._remove_later(client, chosen)
        return chosen

    async def destroy(self, client: Client, name: str) -> bool:
        if client.session is None:
            self._stop_timer(client.key, name)
        return await self._group(client).destroy(name)

    def names(self, client: Client) -> dict[str, str | None]:
        """Return the sandboxes of a session, with the ids of those that exist already. A client
        without a session gets none: it cannot be told from others, and the names are secrets."""
        if client.session not in self._sessions:
            return {}
        sandboxes = self._sessions[client.session].sandboxes
        return {name: sandbox.client.sandbox_id for name, sandbox in sandboxes.items()}

    def _remove_later(self, client: Client, name: str) -> None:
        """Remove a sandbox that was made without a session, unless it is used before."""
        group = self._group(client)
        if name in group.sandboxes:
            end = functools.partial(group.destroy, name)
            self._start_timer((client.key, name), self._linger_seconds, end)

    # The end of a session

    async def end(self, session: str) -> None:
        self._stop_timer("", session)
        group = self._sessions.pop(session, None)
        if group is not None:
            await group.close()

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
        for group in self._sessionless.values():
            await group.close()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.manager.close()
