"""A channel over an attached container: its stdin and stdout, as the engine passes them on.

The engine puts a header before each piece of output, which says whether it is stdout or stderr.
stdout is the guest's half of the channel. The guest writes to stderr only when it cannot start; the
end of that is kept for error messages.

The library's own reader collects a piece until it is as long as its header says, which may be 4
GiB. Ours passes on what has come, and ends the channel at the first header that is not valid.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

from ..base import Channel

if TYPE_CHECKING:
    from aiodocker.stream import Stream

_HEADER = struct.Struct(">B3sL")
_STDOUT, _STDERR, _OF_ENGINE = 1, 2, 3  # the last is what the engine itself has to say
_STREAMS = (_STDOUT, _STDERR, _OF_ENGINE)
_KEPT_BYTES = 4096


class AttachChannel(Channel):
    """A channel that owns the stream it is given. When the stream ends, so does the guest's
    stdin."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._last_words = b""
        self._closed = False
        self._over = False

    @property
    def last_words(self) -> str:
        return self._last_words.decode(errors="replace").strip()

    async def receive(self) -> bytes:
        while not self._closed and not self._over:
            try:
                message = await self._stream.read_out()
            except (OSError, RuntimeError, _engine_error()):
                return b""
            if message is None or message.stream not in _STREAMS:
                self._over = True
            elif message.stream != _STDOUT:
                self._last_words = (self._last_words + message.data)[-_KEPT_BYTES:]
            elif message.data:  # nothing at all would mean the end
                return message.data
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


class Demultiplexer:
    """Reads an attached connection, and feeds the library's queue of messages."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._header = b""
        self._stream = _STDOUT
        self._left = 0  # of the piece under way

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Read a piece. Returns True, with nothing left over, when no more can be read."""
        from aiodocker.stream import Message

        rest = memoryview(data)
        while rest:
            if self._left:
                piece, rest = bytes(rest[: self._left]), rest[self._left :]
                self._left -= len(piece)
                self._queue.feed_data(Message(self._stream, piece), len(piece))
                continue
            missing = _HEADER.size - len(self._header)
            self._header, rest = self._header + bytes(rest[:missing]), rest[missing:]
            if len(self._header) == _HEADER.size:
                self._stream, padding, self._left = _HEADER.unpack(self._header)
                self._header = b""
                if self._stream not in _STREAMS or any(padding):
                    self._queue.feed_eof()
                    return True, b""
        return False, b""

    def feed_eof(self) -> None:
        self._queue.feed_eof()

    def set_exception(self, error: BaseException) -> None:
        self._queue.set_exception(error)


def read_with_ours(stream: Stream) -> None:
    """Replace the library's reader. Call this in the same step of the event loop that made the
    stream: what has come by then is in the old reader's buffer, or has been read."""
    connection = stream._resp.connection if stream._resp is not None else None
    protocol: Any = connection.protocol if connection is not None else None
    if protocol is None or protocol._payload_parser is None:
        raise ConnectionError("the engine has hung up")
    theirs, ours = protocol._payload_parser, Demultiplexer(stream._queue)
    protocol.set_parser(ours, stream._queue)
    if theirs._buf:
        protocol.data_received(bytes(theirs._buf))


def _engine_error() -> type[Exception]:
    import aiohttp

    return aiohttp.ClientError
