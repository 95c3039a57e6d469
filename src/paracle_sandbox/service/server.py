"""The process around the application: uvicorn, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from ..errors import SandboxError
from .app import make_app
from .protocol import HEADER_SECONDS, MAX_CONNECTIONS, ImpatientProtocol
from .service import Service

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5
_WEBSOCKET_BYTES = 2 << 20


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
        await super().shutdown(sockets)
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
