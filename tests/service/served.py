"""A service in this process behind its real server, with as little patience as a test has."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from service_place import KEY, NO_INDEX

from paracle_sandbox.service.connections.slow_clients import Patience
from paracle_sandbox.service.middleware.auth import Gate
from paracle_sandbox.service.server import GracefulServer, bound_socket, make_server
from paracle_sandbox.service.service import Service
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend

SECONDS = 20.0


class _Quiet(GracefulServer):
    """Leaves the signals to pytest."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Served:
    """What a test knows of it, from the server's own side."""

    def __init__(self, server: GracefulServer, service: Service, port: int) -> None:
        self.server = server
        self.service = service
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def gate(self) -> Gate:
        forwarded: Any = self.server.config.app
        assert isinstance(forwarded._app, Gate)
        return forwarded._app

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def client(self, key: str = KEY) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, headers={"X-API-Key": key}, timeout=SECONDS)

    def refused(self, reason: str) -> float:
        counter = self.service.metrics.refusals.labels(reason)
        return float(counter._value.get())

    def dial(self, receive_bytes: int | None = None) -> socket.socket:
        """A connection that blocks nobody; its kernel keeps few bytes that it has not read."""
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.connect(("127.0.0.1", self.port))
        connection.setblocking(False)
        return connection


@asynccontextmanager
async def served(directory: Path, patience: Patience | None = None) -> AsyncIterator[Served]:
    backend = FakeBackend()
    settings = Settings(service_dir=str(directory), api_key=KEY, package_index=NO_INDEX)
    service = Service(settings, backend)
    server = make_server(service, patience)
    server.__class__ = _Quiet
    listening = bound_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await until(lambda: server.started and service.ready)
        yield Served(server, service, port)
    finally:
        server.should_exit = True
        await serving


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def head(method: str, path: str, *headers: str, key: str = KEY) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"X-API-Key: {key}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()
