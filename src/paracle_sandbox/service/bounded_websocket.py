"""WebSockets that take so much of what a client sends into memory, and no more."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from .joining import JoiningTransport
from .outflow import Outflow

MAX_MESSAGE_BYTES = 2 << 20
# Answers to pings that a client does not read.
_MAX_PONG_BYTES = 64 << 10
# Pings and pongs that come together. One read has room for forty thousand, and no client a use for
# more than one or two.
_MAX_PINGS = 1000
_MAX_QUEUED = 64  # messages
_MAX_FRAGMENTS = 4096
_SLICE = 16 << 10


def websocket_options(outflow: Outflow) -> dict[str, Any]:
    """The options of uvicorn for WebSockets that share an outflow."""

    class Socket(BoundedWebSocket):
        pass

    Socket.outflow = outflow
    return {"ws": Socket, "ws_max_size": MAX_MESSAGE_BYTES, "ws_per_message_deflate": False}


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """It is read in slices, and no further while enough messages wait."""

    outflow: Outflow
    _fragments = 0  # bytes of the message that is being received
    _queued = 0  # bytes of messages that nobody has taken yet
    _pings = 0  # of the last read, also those that were answers to ours

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left = bytearray()
        self._feeding = False

    @property
    def _joining(self) -> JoiningTransport:
        found: Any = self.transport
        assert isinstance(found, JoiningTransport)
        return found

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._left.clear()
        self._joining.lost()

    def data_received(self, data: bytes) -> None:
        self._pings = 0
        self._left += data
        self._feed()

    async def receive(self) -> Any:
        message = await super().receive()
        if self.queue.empty():
            self._queued = 0
        if self._left:
            self._feed()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        # uvicorn takes a refusal for a handshake that was forgotten, and logs an error for each.
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True

    def _feed(self) -> None:
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._left and self.queue.qsize() < _MAX_QUEUED and not self.disconnected:
                piece = bytes(self._left[:_SLICE])
                del self._left[:_SLICE]
                super().data_received(piece)
        finally:
            self._feeding = False
        if self._left and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
        if not self.disconnected:
            incomplete = len(self.conn.reader.buffer) + self._fragments
            self.outflow.receive(self._joining, incomplete + self._queued + len(self._left))

    def send_receive_event_to_app(self) -> None:
        self._fragments, size = 0, sum(map(len, self.frames))
        super().send_receive_event_to_app()
        self._queued += size

    def handle_text(self, event: Frame) -> None:
        self._fragments = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._fragments = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._fragments += len(event.data)
        super().handle_cont(event)
        if len(self.frames) > _MAX_FRAGMENTS:
            self._abort()

    def handle_ping(self) -> None:
        super().handle_ping()
        self._count_ping()
        if self._joining.unsent > _MAX_PONG_BYTES:
            self._abort()

    def handle_pong(self, event: Frame) -> None:
        super().handle_pong(event)
        self._count_ping()

    def _count_ping(self) -> None:
        self._pings += 1
        if self._pings > _MAX_PINGS:
            self._abort()

    def _abort(self) -> None:
        """Nothing more of what this client has sent is looked at."""
        self._left.clear()
        self._joining.abort()
