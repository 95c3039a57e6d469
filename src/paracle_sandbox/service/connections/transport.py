"""A transport that knows whose connection it is, and how much the client has taken."""

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
    from .slow_clients import SlowClients

_NO_LINGER = struct.pack("ii", 1, 0)


class CountingTransport:
    """Passes everything on to asyncio's transport, and counts what is written."""

    def __init__(self, transport: asyncio.Transport, slow_clients: SlowClients) -> None:
        self.key_id = ""  # of the last request; empty for a public one, and without a right key
        self.written = 0
        self._transport = transport
        self._slow_clients = slow_clients
        self._lost: asyncio.Event | None = None
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def unsent(self) -> int:
        return 0 if self._is_lost else self._transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        """How many of the written bytes have reached the client's machine."""
        found = self._transport.get_extra_info("socket")
        in_kernel = b"\0" * 4
        with suppress(OSError):  # it may be closed
            in_kernel = fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, in_kernel)
        return self.written - self.unsent - int.from_bytes(in_kernel, sys.byteorder)

    def write(self, data: bytes) -> None:
        if not data or self._transport.is_closing():
            return
        self._transport.write(data)
        self.written += len(data)
        if self._transport.get_write_buffer_size():
            self._slow_clients.watch(self)

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def abort(self) -> None:
        """Close now, and drop what is not sent yet, also in the kernel."""
        found = self._transport.get_extra_info("socket")
        if found is not None and not self._is_lost:
            with suppress(OSError):  # it may be closed
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def mark_lost(self) -> None:
        """Note that the connection is gone. The protocol calls this when asyncio tells it so."""
        self._is_lost = True
        self._slow_clients.forget(self)
        if self._lost is not None:
            self._lost.set()

    async def wait_lost(self) -> None:
        """Wait until the connection is gone."""
        if not self._is_lost:
            self._lost = self._lost or asyncio.Event()
            await self._lost.wait()

    def call_when_sent(self, call: Callable[[], None]) -> None:
        """Call when everything written so far is sent, or never will be."""
        if self.unsent:
            self._slow_clients.watch(self, call)
        else:
            call()
