"""The process around the application: uvicorn, told to be patient with nobody."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import SandboxError
from .app import make_app
from .joining import JoiningTransport
from .service import Service

logger = logging.getLogger(__name__)

HEADER_SECONDS = 15.0
MAX_HEADER_BYTES = 64 << 10
# Of requests that are sent before an earlier one is answered.
MAX_AHEAD_BYTES = 256 << 10
# Beyond it, whoever has waited longest without a request makes room for the next.
MAX_CONNECTIONS = 6000
SHUTDOWN_SECONDS = 5
_WEBSOCKET_BYTES = 2 << 20
_NO_WEBSOCKET = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 that lets a client go which does not send its request in time, and sooner when
    many do not: a crowd of silent ones must not keep the others out."""

    since = 0.0
    _ahead = 0
    _look: asyncio.TimerHandle | None = None

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

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def _make_room(self) -> None:
        mine = (one for one in self.connections if isinstance(one, ImpatientProtocol))
        waiting = [one for one in mine if one.is_waiting and one is not self]
        if waiting:
            min(waiting, key=lambda one: one.since).transport.close()

    def data_received(self, data: bytes) -> None:
        """More of what must wait is read with each answer, and would pile up."""
        self._ahead = self._ahead + len(data) if self.conn.their_state is h11.DONE else 0
        if self._ahead > MAX_AHEAD_BYTES:
            self.transport.close()
        else:
            super().data_received(data)

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

    def _watch_headers(self) -> None:
        self.since = self.loop.time()
        if self._look is not None:
            self._look.cancel()  # it would keep its request until then
        self._look = self.loop.call_later(HEADER_SECONDS, self._check_headers, self.cycle)

    def _check_headers(self, before: object) -> None:
        """Still the same request as then: none has come since."""
        if self.cycle is before and self.is_waiting and not self.transport.is_closing():
            self.transport.close()


def allow_many_descriptors() -> None:
    """A connection is one, a sandbox a few; many systems begin with a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_CONNECTIONS
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


def bound_socket(host: str, port: int) -> socket.socket:
    """Raises SandboxError with what to do when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # Connections inherit it. Without, an answer in two pieces waits 40 ms for the second.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise SandboxError(
            f"Cannot listen on {host} port {port}: {error.strerror}. "
            "Choose another with SANDBOX_API_PORT or --port."
        ) from error


class GracefulServer(uvicorn.Server):
    """Ends what runs before it waits for the answers, so that every client gets one."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.wind_down()
        try:
            await super().shutdown(sockets)
        finally:
            # Here, because a signal is passed on as soon as this returns, and ends the process.
            await self._service.backend.close()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of the event loop to run it in: uvloop's where that is installed, else Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def make_server(service: Service, **options: Any) -> uvicorn.Server:
    allow_many_descriptors()
    config = uvicorn.Config(
        make_app(service),
        http=ImpatientProtocol,
        ws="websockets-sansio",
        ws_max_size=_WEBSOCKET_BYTES,
        ws_per_message_deflate=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=2 * MAX_CONNECTIONS,
        timeout_keep_alive=int(HEADER_SECONDS),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        server_header=False,
        log_config=None,
        access_log=False,
        lifespan="on",
        **options,
    )
    return GracefulServer(config, service)
