"""A channel over an attached container: its stdin and stdout, as the engine passes them on.

The engine puts a header before each piece of output, which says whether it is stdout or stderr.
stdout is the guest's half of the channel. On stderr the guest says nothing unless it cannot start;
the last of that is kept for whoever asks why.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..base import Channel

if TYPE_CHECKING:
    from aiodocker.stream import Stream

_STDERR = 2
_KEPT_BYTES = 4096


class AttachChannel(Channel):
    """Owns the stream it is given. The end of the stream is the end of the guest's stdin."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._last_words = b""
        self._closed = False

    @property
    def last_words(self) -> str:
        return self._last_words.decode(errors="replace").strip()

    async def receive(self) -> bytes:
        while not self._closed:
            try:
                message = await self._stream.read_out()
            except (OSError, RuntimeError, _engine_error()):
                return b""
            if message is None:
                return b""
            if message.stream != _STDERR:
                return message.data
            self._last_words = (self._last_words + message.data)[-_KEPT_BYTES:]
        return b""

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        except (OSError, RuntimeError, AssertionError, _engine_error()) as error:
            # The library asserts that the connection is there.
            raise ConnectionError(f"the guest is gone: {error}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        connection = getattr(self._stream._resp, "connection", None)
        transport = getattr(connection, "transport", None)
        with contextlib.suppress(OSError, RuntimeError, AssertionError, _engine_error()):
            await self._stream.close()
        if transport is not None:
            transport.abort()  # what has not left yet is for nobody


def _engine_error() -> type[Exception]:
    import aiohttp

    return aiohttp.ClientError
