"""uvicorn's HTTP protocol, with limits for clients that send or read too little, or too much.

The service closes the connection of a client that does not send its request in time, and sooner
when many do not. ``slow_clients`` cuts off a client that does not read. A request that breaks the
letter of HTTP is refused, because a proxy in front might read it differently.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from .slow_clients import SlowClients
from .transport import CountingTransport

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
# For requests that are sent before an earlier one is answered.
MAX_AHEAD_BYTES = 256 << 10
_NO_WEBSOCKET = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def http_options(slow_clients: SlowClients) -> dict[str, Any]:
    """uvicorn's options for connections that share the same limits."""

    class Http(ImpatientProtocol):
        pass

    Http.slow_clients = slow_clients
    return {
        "http": Http,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "limit_concurrency": 2 * slow_clients.patience.max_connections,
        "timeout_keep_alive": max(1, int(slow_clients.patience.header_seconds)),
    }


class StrictBuffer(ReceiveBuffer):
    """Refuses heads with bare CR or LF, or folded lines, which h11 takes."""

    _head: bytes | None = None

    def _extract(self, count: int) -> bytearray:
        found = super()._extract(count)
        if self._head is not None:
            self._head = bytes(found)
        return found

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._head = b""
        lines = super().maybe_extract_lines()
        head, self._head = self._head, None
        ends = head.count(b"\r\n")
        if head.count(b"\n") != ends or head.count(b"\r") != ends:
            raise h11.RemoteProtocolError("a line does not end in CR LF")
        if b"\n " in head or b"\n\t" in head:
            raise h11.RemoteProtocolError("a header is folded")
        return lines


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose client does not send its request in time, and sooner
    when many do not: a crowd of silent clients must not keep the others out."""

    slow_clients: SlowClients
    since = 0.0
    _ahead = 0
    _kept = 0
    _look: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn._receive_buffer = StrictBuffer()

    @property
    def is_waiting(self) -> bool:
        """Whether the client is to send a request, or the rest of one's head."""
        between = self.cycle is None or self.cycle.response_complete
        # A WebSocket took the connection over: it has its own ways to notice who is gone.
        return bool(between and self.transport.get_protocol() is self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        counting: Any = CountingTransport(transport, self.slow_clients)
        self.app_state = {**self.app_state, "connection": counting}
        super().connection_made(counting)
        self._watch_headers()
        if len(self.connections) > self.slow_clients.patience.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()
        self._counting.mark_lost()

    @property
    def _counting(self) -> CountingTransport:
        found: Any = self.transport
        assert isinstance(found, CountingTransport)
        return found

    def _make_room(self) -> None:
        """Close the connection that is idle for longest, or else the one unread for longest."""
        mine = (one for one in self.connections if isinstance(one, ImpatientProtocol))
        waiting = [one for one in mine if one.is_waiting and one is not self]
        if waiting:
            oldest = min(waiting, key=lambda one: one.since)._counting
            if oldest.unsent:
                self.slow_clients.cut(oldest)
            else:
                oldest.close()
        elif (lazy := self.slow_clients.oldest()) is not None:
            self.slow_clients.cut(lazy)

    def data_received(self, data: bytes) -> None:
        """Refuse a client that sends many requests ahead: they would pile up behind the first."""
        self._ahead = self._ahead + len(data) if self.conn.their_state is h11.DONE else 0
        if self._ahead > MAX_AHEAD_BYTES:
            self._counting.abort()
            return
        super().data_received(data)
        self._count_unread()

    def _count_unread(self) -> None:
        """Account for the bytes of heads, bodies and requests that the application has not read."""
        kept = len(self.conn._receive_buffer)
        if self.cycle is not None and not self.cycle.response_complete:
            kept += len(self.cycle.body)
        if kept or self._kept:
            self._kept = kept
            self.slow_clients.receive(self._counting, kept)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        taken: Any = self.transport.get_protocol()
        # The parser of websockets is stricter, and after an error waits for the client to leave.
        if taken.conn.eof_sent and not self.transport.is_closing():
            self.transport.write(_NO_WEBSOCKET)
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_headers()
        if self._kept:
            self._count_unread()

    def _watch_headers(self) -> None:
        self.since = self.loop.time()
        if self._look is not None:
            self._look.cancel()  # it would keep its request until then
        seconds = self.slow_clients.patience.header_seconds
        self._look = self.loop.call_later(seconds, self._check_headers, self.cycle)

    def _check_headers(self, before: object) -> None:
        """Close the connection if no request has come since."""
        if self.cycle is before and self.is_waiting and not self.transport.is_closing():
            self.transport.close()
