"""Offer a connected stream socket as a channel."""

from __future__ import annotations

import asyncio
import socket

from .base import Channel

RECEIVE_SIZE = 256 << 10


class SocketChannel(Channel):
    """A channel over a socket, which it owns and closes.

    The event loop watches the socket from the first `receive` on. Watching begins and ends with
    a system call each, so it ends only when bytes arrive and no task waits for them.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._number = sock.fileno()
        self._watched_by: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[bytes] | None = None

    async def receive(self) -> bytes:
        # loop.sock_recv would begin and end to watch the socket for every message.
        data = self._receive_now()
        if data is not None:
            return data
        loop = asyncio.get_running_loop()
        if self._watched_by is not loop:
            self._unwatch()
            # The number, not the socket: asyncio formats what it is given into an error message
            # that it then drops.
            loop.add_reader(self._number, self._on_readable)
            self._watched_by = loop
        self._waiter = loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _receive_now(self) -> bytes | None:
        try:
            return self._sock.recv(RECEIVE_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            # Some guests end with a reset; the reader treats every end alike.
            return b""

    def _on_readable(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._unwatch()  # until the next receive() waits
        elif (data := self._receive_now()) is not None:
            self._waiter.set_result(data)

    def _unwatch(self) -> None:
        if self._watched_by is not None and not self._watched_by.is_closed():
            self._watched_by.remove_reader(self._number)
        self._watched_by = None

    async def send(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise ConnectionError(f"The guest has ended: {error}") from error

    def send_now(self, data: bytes) -> int:
        try:
            return self._sock.send(data)
        except OSError:
            return 0

    async def close(self) -> None:
        self._unwatch()
        self._sock.close()
