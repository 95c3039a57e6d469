"""A channel over a connected stream socket."""

from __future__ import annotations

import asyncio
import socket

from ..backends.base import Channel

RECEIVE_SIZE = 256 << 10


class SocketChannel(Channel):
    """Owns the socket it is given."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def receive(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._sock, RECEIVE_SIZE)
        except OSError:
            # A reset is how some guests end; the reader treats every end alike.
            return b""

    async def send(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise ConnectionError(f"the guest is gone: {error}") from error

    async def close(self) -> None:
        self._sock.close()
