"""The uvicorn server around the application: its socket, its limits, and how it shuts down."""

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
from .connections.http_protocol import http_options
from .connections.slow_clients import Patience, SlowClients
from .connections.websocket_protocol import websocket_options
from .service import Service

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = Patience().max_connections
SHUTDOWN_SECONDS = 5
_SEND_BYTES = 512 << 10


def allow_many_descriptors() -> None:
    """Raise the limit of open files, which often is 1024: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_CONNECTIONS
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


def bound_socket(host: str, port: int) -> socket.socket:
    """Make the listening socket. Raises SandboxError with what to do when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # Connections inherit it. Without, an answer in two pieces waits 40 ms for the second.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Else the kernel keeps up to 4 MB for a client that does not read.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        return listening
    except OSError as error:
        raise SandboxError(
            f"Cannot listen on {host} port {port}: {error.strerror}. "
            "Choose another with SANDBOX_API_PORT or --port."
        ) from error


class GracefulServer(uvicorn.Server):
    """Ends programs before it waits for their answers, so that every client gets one."""

    def __init__(self, config: uvicorn.Config, service: Service, slow_clients: SlowClients) -> None:
        super().__init__(config)
        self._service = service
        self.slow_clients = slow_clients

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.wind_down()
        try:
            await super().shutdown(sockets)
        finally:
            # Here, because a signal is passed on as soon as this returns, and ends the process.
            await self._service.backend.close()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop where that is installed, or None for Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def make_server(
    service: Service, patience: Patience | None = None, **options: Any
) -> GracefulServer:
    allow_many_descriptors()
    unread = service.metrics.refusals.labels("unread")
    slow_clients = SlowClients(patience or Patience(), on_cut=unread.inc)
    config = uvicorn.Config(
        make_app(service),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        server_header=False,
        log_config=None,
        proxy_headers=False,  # only those of SANDBOX_TRUSTED_PROXIES, by ForwardedFor
        access_log=False,
        lifespan="on",
        **http_options(slow_clients),
        **websocket_options(slow_clients),
        **options,
    )
    return GracefulServer(config, service, slow_clients)
