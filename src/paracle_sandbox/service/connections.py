"""Connections as uvicorn serves them, but for clients that send or read too little, or too much.

A client is let go that does not send its request in time, and sooner when many do not. One that
does not read is cut off (``outflow``). What is no HTTP to the letter is refused, since a proxy in
front might take it for something else than we do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from .joining import JoiningTransport
from .outflow import Outflow

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
# Of requests that are sent before an earlier one is answered.
MAX_AHEAD_BYTES = 256 << 10
_NO_WEBSOCKET = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def http_options(outflow: Outflow) -> dict[str, Any]:
    """The options of uvicorn for connections that share an outflow."""

    class Http(ImpatientProtocol):
        pass

    Http.outflow = outflow
    return {
        "http": Http,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "limit_concurrency": 2 * outflow.patience.max_connections,
        "timeout_keep_alive": max(1, int(outflow.patience.header_seconds)),
    }


class StrictBuffer(ReceiveBuffer):
    """Heads whose lines end as HTTP says, and are not folded. h11 takes more than that."""

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
    """HTTP/1.1 that lets a client go which does not send its request in time, and sooner when
    many do not: a crowd of silent ones must not keep the others out."""

    outflow: Outflow
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
        """For a request, or the rest of one's head."""
        between = self.cycle is None or self.cycle.response_complete
        # A WebSocket took the connection over: it has its own ways to notice who is gone.
        return bool(between and self.transport.get_protocol() is self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        joining: Any = JoiningTransport(transport, self.loop, self.outflow)
        self.app_state = {**self.app_state, "connection": joining}
        super().connection_made(joining)
        self._watch_headers()
        if len(self.connections) > self.outflow.patience.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()
        self._joining.lost()

    @property
    def _joining(self) -> JoiningTransport:
        found: Any = self.transport
        assert isinstance(found, JoiningTransport)
        return found

    def _make_room(self) -> None:
        """Whoever has waited longest goes, or who has not read for longest."""
        mine = (one for one in self.connections if isinstance(one, ImpatientProtocol))
        waiting = [one for one in mine if one.is_waiting and one is not self]
        if waiting:
            oldest = min(waiting, key=lambda one: one.since)._joining
            if oldest.unsent:
                self.outflow.cut(oldest)
            else:
                oldest.close()
        elif (lazy := self.outflow.oldest()) is not None:
            self.outflow.cut(lazy)

    def data_received(self, data: bytes) -> None:
        """More of what must wait is read with each answer, and would pile up."""
        self._ahead = self._ahead + len(data) if self.conn.their_state is h11.DONE else 0
        if self._ahead > MAX_AHEAD_BYTES:
            self._joining.abort()
            return
        super().data_received(data)
        self._count_unread()

    def _count_unread(self) -> None:
        """What is here of heads, bodies and requests that nobody has taken yet."""
        kept = len(self.conn._receive_buffer)
        if self.cycle is not None and not self.cycle.response_complete:
            kept += len(self.cycle.body)
        if kept or self._kept:
            self._kept = kept
            self.outflow.receive(self._joining, kept)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        taken: Any = self.transport.get_protocol()
        # Another parser, which is stricter, and waits for the client to leave without a word.
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
        seconds = self.outflow.patience.header_seconds
        self._look = self.loop.call_later(seconds, self._check_headers, self.cycle)

    def _check_headers(self, before: object) -> None:
        """Still the same request as then: none has come since."""
        if self.cycle is before and self.is_waiting and not self.transport.is_closing():
            self.transport.close()
