"""A byte stream to a guest over one of Daytona's terminals, which a websocket carries."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import SandboxCreationError
from ..base import Channel
from .requests import READY

_READY_SECONDS = 30.0
# What may wait for us; more stalls the websocket, and with it the guest.
_MAX_WAITING = 64
_SEND_SIZE = 32 << 10


class PtyChannel(Channel):
    """A channel over a terminal. ``receive_data`` is the callback of the SDK's handle, which is set
    afterwards."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        self._before = b""
        self._ready = asyncio.Event()
        self._handle: Any = None
        self._end: asyncio.Task[None] | None = None

    async def receive_data(self, data: bytes) -> None:
        if self._ready.is_set():
            await self._waiting.put(data)
            return
        self._before += data
        _, mark, rest = self._before.partition(READY)
        if mark:
            self._ready.set()
            if rest:
                await self._waiting.put(rest)

    async def begin(self, handle: Any, line: bytes, sandbox_id: str) -> None:
        """Send the line that starts the guest. Raises SandboxCreationError when the guest does not
        answer."""
        self._handle = handle
        self._end = asyncio.create_task(self._watch_end())
        await handle.send_input(line)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                await self._ready.wait()
        except TimeoutError:
            said = self._before[-300:].decode("utf-8", "replace")
            raise SandboxCreationError(
                f"The terminal did not become a channel; it said {said!r}", sandbox_id,
                step="connect",
            ) from None  # fmt: skip

    async def _watch_end(self) -> None:
        await self._handle.wait()
        await self._waiting.put(b"")

    async def receive(self) -> bytes:
        data = await self._waiting.get()
        if not data:
            self._waiting.put_nowait(b"")  # and for whoever asks again
        return data

    async def send(self, data: bytes) -> None:
        from daytona import DaytonaError

        try:
            for start in range(0, len(data), _SEND_SIZE):
                await self._handle.send_input(data[start : start + _SEND_SIZE])
        except (DaytonaError, OSError) as error:
            raise ConnectionError(f"the guest is gone: {error}") from error

    async def close(self) -> None:
        if self._end is not None:
            self._end.cancel()
        if self._handle is not None:
            handle, self._handle = self._handle, None
            await handle.disconnect()
