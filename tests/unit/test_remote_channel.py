"""Tests of the remote channel against a service, or a proxy before it, that refuses connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from paracle_sandbox.backends.remote.channel import RemoteChannel
from paracle_sandbox.channel.resumable import data_message
from paracle_sandbox.errors import (
    BackendUnavailableError,
    SandboxConflictError,
    SandboxError,
    SandboxExecutionError,
    SandboxLimitError,
    SandboxNotFoundError,
)


class Front:
    """A server that accepts or refuses connections.

    ``answers`` has a status for each of them, and 0 accepts. An accepted client gets one letter and
    is then cut off.
    """

    def __init__(self, *answers: int, body: bytes = b"") -> None:
        self.answers = list(answers)
        self.body = body
        self.dialled = 0

    def process_request(self, connection: ServerConnection, _: Request) -> Response | None:
        status = self.answers[self.dialled]
        self.dialled += 1
        return Response(status, "", Headers(), self.body) if status else None

    async def handle(self, connection: ServerConnection) -> None:
        await connection.send(b"a0")
        await connection.send(data_message(str(self.dialled).encode()))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with serve(
            self.handle, "127.0.0.1", 0, process_request=self.process_request
        ) as server:
            yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/channel"


def told(kind: str) -> bytes:
    return json.dumps({"error": "so it is", "error_type": kind}).encode()


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, told("Denied"), BackendUnavailableError, "SANDBOX_API_KEY"),
        (404, told("NotFound"), SandboxNotFoundError, "so it is"),
        (404, b"", SandboxNotFoundError, "not found"),
        (409, told("Conflict"), SandboxConflictError, "so it is"),
        (429, told("TooMany"), SandboxLimitError, "so it is"),
        (429, b"<html>slow down</html>", SandboxLimitError, "429"),
        (503, told("Unavailable"), SandboxLimitError, "so it is"),
        (503, b"", BackendUnavailableError, "behind the proxy"),
        (502, told("SandboxExecutionError"), SandboxExecutionError, "so it is"),
        (502, b"\xff", SandboxExecutionError, "502"),
    ],
)
async def test_a_refusal_is_what_a_request_would_get(
    status: int, body: bytes, error: type[SandboxError], message: str
) -> None:
    async with Front(status, body=body).listening() as address:
        with pytest.raises(SandboxError, match=message) as refused:
            await RemoteChannel.open(address, {}, "one")
    assert type(refused.value) is error
    assert refused.value.sandbox_id == "one"


async def test_a_proxy_that_is_unwell_does_not_cost_the_sandbox() -> None:
    front = Front(0, 502, 503, 429, 500, 0, 404)
    async with front.listening() as address:
        channel = await RemoteChannel.open(address, {}, "one")
        assert await asyncio.wait_for(channel.receive(), 20) == b"1"
        assert await asyncio.wait_for(channel.receive(), 20) == b"6"
        assert await asyncio.wait_for(channel.receive(), 20) == b""
        await channel.close()


@pytest.mark.parametrize("status", [401, 403, 404, 409])
async def test_a_refusal_for_good_ends_it_at_once(status: int) -> None:
    front = Front(0, status)
    async with front.listening() as address:
        channel = await RemoteChannel.open(address, {}, "one")
        assert await asyncio.wait_for(channel.receive(), 20) == b"1"
        assert await asyncio.wait_for(channel.receive(), 20) == b""
        await channel.close()
    assert front.dialled == 2
