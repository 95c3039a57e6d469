"""How requests are read from a connection: uvicorn's protocol, told to be patient with nobody."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .joining import JoiningTransport

HEADER_SECONDS = 15.0
MAX_HEADER_BYTES = 64 << 10
# Beyond it, whoever has waited longest without a request makes room for the next.
MAX_CONNECTIONS = 6000


class ImpatientProtocol(HttpToolsProtocol):
    """HTTP/1.1 that lets a client go which does not send its request in time, and sooner when
    many do not: a crowd of silent ones must not keep the others out.

    The parser keeps a head until it is whole, and what follows the last piece of a body, however
    long they are: that is bounded here, and a request has to name one host."""

    since = 0.0
    _kept_bytes = 0
    _goes_on = False

    @property
    def is_waiting(self) -> bool:
        """For a request, or the rest of one's head."""
        between = self.cycle is None or self.cycle.response_complete
        # A WebSocket took the connection over: it has its own ways to notice who is gone.
        return bool(between and self.transport.get_protocol() is self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
        self._watch_headers()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def _make_room(self) -> None:
        mine = (one for one in self.connections if isinstance(one, ImpatientProtocol))
        waiting = [one for one in mine if one.is_waiting and one is not self]
        if waiting:
            min(waiting, key=lambda one: one.since).transport.close()

    def data_received(self, data: bytes) -> None:
        self._goes_on = False
        super().data_received(data)
        self._kept_bytes = 0 if self._goes_on else self._kept_bytes + len(data)
        if self._kept_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._goes_on = True
        # The parser makes a refusal of what is raised here.
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            raise ValueError("the head is too large")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise ValueError("one host has to be named")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._goes_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._goes_on = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_headers()

    def _watch_headers(self) -> None:
        self.since = self.loop.time()
        self.loop.call_later(HEADER_SECONDS, self._check_headers, self.cycle)

    def _check_headers(self, before: object) -> None:
        """Still the same request as then: none has come since."""
        if self.cycle is before and self.is_waiting and not self.transport.is_closing():
            self.transport.close()
