"""A channel over an exec: stdin and stdout of a command, each a websocket of its own.

Binary messages are the bytes; an empty text message is the server's way to say that there are no
more. The guest writes to stderr only when it cannot start or go on, and the end of that is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from ..base import Channel

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

_KEPT_BYTES = 4096
_LAST_WORDS_SECONDS = 2.0
# The server copies in pieces of 32 KB, and a message of any size costs it a buffer of that size.
_PIECE = 1 << 20


class ExecChannel(Channel):
    """A channel that owns the four streams. When stdin ends, so does the guest."""

    def __init__(
        self,
        stdin: aiohttp.ClientWebSocketResponse,
        stdout: aiohttp.ClientWebSocketResponse,
        stderr: aiohttp.ClientWebSocketResponse,
        control: aiohttp.ClientWebSocketResponse,
        operation: str,
    ) -> None:
        self.operation = operation
        self._stdin = stdin
        self._stdout = stdout
        self._others = (stderr, control)
        self._first = b""
        self._was_ready = False
        self._last_words = b""
        self._listening = [asyncio.ensure_future(self._drain(one)) for one in (stdin, control)]
        self._stderr = asyncio.ensure_future(self._listen(stderr))
        self._closed = False

    async def ready(self) -> bool:
        """Wait for the first word from the other side. Returns False when it has gone instead."""
        self._first = self._first or await self.receive()
        self._was_ready = bool(self._first)
        return self._was_ready

    async def last_words(self) -> str:
        """Return what was written to stderr, once that has ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._stderr), _LAST_WORDS_SECONDS)
        return self._last_words.decode(errors="replace").strip()

    async def receive(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        while not self._closed:
            data = await _next(self._stdout)
            if data is None:
                await self._tell_end()
                return b""
            if data:
                return data
        return b""

    async def _tell_end(self) -> None:
        """Log how a guest ended whose channel we had not closed: its porter reports that, and
        sometimes why. Nothing is reported when the server, or something else of the instance, ended
        first."""
        if self._was_ready and not self._closed:
            words = await self.last_words()
            logger.warning("A guest has ended under us: %s", words or "nothing was said")

    async def send(self, data: bytes) -> None:
        import aiohttp

        try:
            for start in range(0, len(data), _PIECE):
                piece = data if len(data) <= _PIECE else data[start : start + _PIECE]
                await self._stdin.send_bytes(piece)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ConnectionError(f"the guest is gone: {error}") from error

    async def finish_input(self) -> None:
        """End the reader: what it reads next is the end."""
        with contextlib.suppress(OSError, RuntimeError):
            await self._stdin.send_str("")

    def abandon(self) -> None:
        self._closed = True
        for stream in (self._stdin, self._stdout, *self._others):
            stream._response.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in (*self._listening, self._stderr):
            task.cancel()
        await asyncio.gather(*self._listening, self._stderr, return_exceptions=True)
        await asyncio.gather(*map(_hang_up, (self._stdin, self._stdout, *self._others)))

    async def _listen(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        while (data := await _next(stream)) is not None:
            self._last_words = (self._last_words + data)[-_KEPT_BYTES:]

    @staticmethod
    async def _drain(stream: aiohttp.ClientWebSocketResponse) -> None:
        """Read a stream that carries nothing but pings and the end, which have to be read to be
        answered."""
        while await _next(stream) is not None:
            pass


async def _next(stream: aiohttp.ClientWebSocketResponse) -> bytes | None:
    """Return the bytes of one message; None at the end."""
    import aiohttp

    try:
        message = await stream.receive()
    except (aiohttp.ClientError, OSError, RuntimeError):
        return None
    return message.data if message.type is aiohttp.WSMsgType.BINARY else None


async def _hang_up(stream: aiohttp.ClientWebSocketResponse) -> None:
    import aiohttp

    with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError, TimeoutError):
        # Not the polite way, which waits for the server: the end of the stream is all it needs.
        stream._response.close()
