"""A transport that sends together what is written together.

The head and the body of an answer are two writes; sent apart, they are two system calls, and wake
whoever waits twice. What is written within one turn of the loop goes out at its end, in one piece;
more than a little goes out at once, so that the connection's own flow control sees it.
"""

from __future__ import annotations

import asyncio
from typing import Any

MAX_HELD = 64 << 10


class JoiningTransport:
    """All of the transport it stands for, but for when it writes."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not data:
            return
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._size += len(data)
        if self._size > MAX_HELD:
            self._flush()

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held, self._size = self._held, [], 0
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))
