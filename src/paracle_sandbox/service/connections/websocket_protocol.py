"""uvicorn's WebSocket protocol, with limits on what a client's messages take of our memory."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode

from .slow_clients import SlowClients
from .transport import CountingTransport

MAX_MESSAGE_BYTES = 2 << 20
# Pongs that the client has not read.
_MAX_PONG_BYTES = 64 << 10
# Pings and pongs in one read, which has room for forty thousand. A client needs one or two.
_MAX_PINGS = 1000
_MAX_QUEUED = 64  # messages
_MAX_FRAGMENTS = 4096
_SLICE = 16 << 10


def websocket_options(slow_clients: SlowClients) -> dict[str, Any]:
    """uvicorn's options for WebSockets that share the same limits."""

    class Socket(BoundedWebSocket):
        pass

    Socket.slow_clients = slow_clients
    return {"ws": Socket, "ws_max_size": MAX_MESSAGE_BYTES, "ws_per_message_deflate": False}


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """Reads in slices, and stops reading while enough messages wait."""

    slow_clients: SlowClients
    _fragments = 0  # bytes of the message that is being received
    _queued = 0  # bytes of messages that the application has not received yet
    _pings = 0  # in the last read, together with pongs

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._left = bytearray()
        self._feeding = False

    @property
    def _counting(self) -> CountingTransport:
        found: Any = self.transport
        assert isinstance(found, CountingTransport)
        return found

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._left.clear()
        self._counting.mark_lost()

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
            self.slow_clients.receive(self._counting, incomplete + self._queued + len(self._left))

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

    def handle_events(self) -> None:
        # By now a pong is queued for each ping: count them before any is sent.
        frames = (event for event in self.conn.events if isinstance(event, Frame))
        self._pings += sum(frame.opcode in (Opcode.PING, Opcode.PONG) for frame in frames)
        if self._pings > _MAX_PINGS:
            self._abort()
            return
        super().handle_events()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self._counting.unsent > _MAX_PONG_BYTES:
            self._abort()

    def _abort(self) -> None:
        """Close now, and ignore what this client has sent so far."""
        self._left.clear()
        self._counting.abort()
