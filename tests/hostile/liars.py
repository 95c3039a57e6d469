"""Guests that are a script of the test: they show what a host must bear from a hostile inside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from paracle_sandbox.backends.base import Backend, Channel, Health, SandboxInfo, Usage
from paracle_sandbox.channel import frames

Script = Callable[["LyingChannel", int, int, bytes], Awaitable[None]]
HELLO = frames.encode_json(frames.HELLO, 0, {"protocol": 1, "python": "3.11.0", "pid": 1})


class LyingChannel(Channel):
    """A channel to a scripted guest, whose script is called for each frame of the host."""

    def __init__(self, script: Script, hello: bytes = HELLO) -> None:
        self._script = script
        self._frames = frames.FrameReader(frames.TO_GUEST)
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._said.put_nowait(hello)
        self.closed = False

    def say(self, data: bytes) -> None:
        self._said.put_nowait(data)

    async def receive(self) -> bytes:
        return await self._said.get()

    async def send(self, data: bytes) -> None:
        for kind, stream, payload in self._frames.feed(data):
            await self._script(self, kind, stream, payload)

    async def close(self) -> None:
        self.closed = True


class LyingBackend(Backend):
    name = "lying"

    def __init__(self, script: Script, hello: bytes) -> None:
        self.channel = LyingChannel(script, hello)
        self.destroyed = 0

    async def health(self) -> Health:
        return Health(self.name, True)

    async def create(self, sandbox_id: str, config: Any, labels: Mapping[str, str]) -> None:
        pass

    async def connect(self, sandbox_id: str) -> Channel:
        return self.channel

    async def usage(self, sandbox_id: str) -> Usage:
        return Usage()

    async def destroy(self, sandbox_id: str) -> None:
        self.destroyed += 1

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return []
