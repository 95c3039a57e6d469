"""A transport that sends together what is written together, and knows what is not sent yet.

The head and the body of an answer are two writes; sent apart, they are two system calls, and wake
whoever waits twice. What is written within one turn of the loop goes out at its end, in one piece;
more than a little goes out at once, so that the connection's own flow control sees it.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .outflow import Outflow

MAX_HELD = 64 << 10
_NO_LINGER = struct.pack("ii", 1, 0)


class JoiningTransport:
    """All of the transport it stands for, but for when it writes."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, outflow: Outflow
    ) -> None:
        self.key_id = ""  # of the last request; empty for a public one, and without a right key
        self.written = 0
        self._transport = transport
        self._loop = loop
        self._outflow = outflow
        self._held: list[bytes] = []
        self._size = 0
        self._lost: asyncio.Event | None = None
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def unsent(self) -> int:
        return 0 if self._is_lost else self._transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        """How much of what was written the client's machine has got."""
        found = self._transport.get_extra_info("socket")
        in_kernel = b"\0" * 4
        with suppress(OSError):  # it may be closed
            in_kernel = fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, in_kernel)
        return self.written - self.unsent - int.from_bytes(in_kernel, sys.byteorder)

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
        """Send what is left, as long as the client takes it, and close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close now. What is not sent yet is dropped, also by the kernel."""
        self._held, self._size = [], 0
        found = self._transport.get_extra_info("socket")
        if found is not None and not self._is_lost:
            with suppress(OSError):  # it may be closed
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def lost(self) -> None:
        """The protocol was told that the connection is gone."""
        self._is_lost = True
        self._outflow.forget(self)
        if self._lost is not None:
            self._lost.set()

    async def gone(self) -> None:
        """Wait until the connection is gone."""
        if not self._is_lost:
            self._lost = self._lost or asyncio.Event()
            await self._lost.wait()

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call when all is sent that was written so far, or never will be."""
        self._flush()
        if self.unsent:
            self._outflow.watch(self, call)
        else:
            call()

    def _flush(self) -> None:
        held, self._held, size, self._size = self._held, [], self._size, 0
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))
            self.written += size
            if self._transport.get_write_buffer_size():
                self._outflow.watch(self)
