"""A service that means its client ill: whatever it answers, the client ends in time, with an error
that has a type, and gives its key to nobody else."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from paracle_sandbox import SandboxConfig, Settings
from paracle_sandbox.backends.remote.backend import RemoteBackend
from paracle_sandbox.backends.remote.reachability import service_problem
from paracle_sandbox.errors import BackendUnavailableError, SandboxError

KEY = "the key of this client"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def hostile(answer: Answer) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Its address, and the heads of what it was sent."""
    heads: list[bytes] = []
    open_ones: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.append(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        for writer in open_ones:
            writer.transport.abort()


def with_body(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return answer


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b" ")
        await asyncio.sleep(0.02)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.transport.is_closing():
        writer.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        await writer.drain()


def bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(300)) + packer.flush()


def info_with_layers(count: int) -> bytes:
    layers = {f"{number:x}": True for number in range(count)}
    return json.dumps({"version": "1", "backend": "native", "layers": layers}).encode()


ANSWERS: dict[str, Callable[[], Answer]] = {
    "a bomb": lambda: with_body(bomb(), "Content-Encoding: gzip"),
    "a small gzip": lambda: with_body(gzip.compress(b"{}"), "Content-Encoding: gzip"),
    "drips": lambda: drip,
    "endless": lambda: endless,
    "no JSON": lambda: with_body(b"<html>"),
    "bottomless": lambda: with_body(b"[" * 100_000),
    "a list": lambda: with_body(b"[]"),
    "many lists": lambda: with_body(b"[" + b"[]," * 1_300_000 + b"[]]"),
    "many layers": lambda: with_body(info_with_layers(250_000)),
    "no sandboxes": lambda: with_body(b'{"sandboxes": 5}'),
    "odd sandboxes": lambda: with_body(b'{"sandboxes": [{"sandbox_id": 1}]}'),
    "odd fields": lambda: with_body(json.dumps({"sandboxes": [{
        "sandbox_id": "x", "state": [], "created_at": "never", "config": 1, "labels": "abc"}],
    }).encode()),
    "a redirect": lambda: with_body(b"", "Location: http://127.0.0.1:1/", status="307 Go"),
    "an odd error": lambda: with_body(b'{"error": {"a": 1}, "details": 7}', status="500 No"),
    "an error of many lists": lambda: with_body(
        b'{"error": [' + b"[]," * 1_300_000 + b"[]]}", status="500 No"
    ),
    "an error type of its choice": lambda: with_body(
        b'{"error": "x", "error_type": "SystemExit", "details": {"stdout": []}}', status="500 No"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ANSWERS)
async def test_odd_answers_are_errors_with_a_type(what: str) -> None:
    async with hostile(ANSWERS[what]()) as (url, _):
        backend = RemoteBackend(Settings(api_url=url, api_key=KEY, request_timeout=0.5))
        try:
            async with asyncio.timeout(30):
                with pytest.raises(SandboxError):
                    await backend.list_sandboxes()
                assert not (await backend.health()).available
                if what not in ("no sandboxes", "odd sandboxes", "odd fields"):
                    with pytest.raises(SandboxError):
                        await backend.create("x", SandboxConfig(), {})
        finally:
            await backend.close()


@pytest.mark.parametrize("what", ANSWERS)
async def test_odd_answers_are_no_service_that_auto_would_take(what: str) -> None:
    async with hostile(ANSWERS[what]()) as (url, _):
        problem = await asyncio.to_thread(service_problem, Settings(api_url=url), 0.5)
        assert isinstance(problem, str)


async def test_a_service_tells_of_so_many_layers_in_so_many_words() -> None:
    body = json.loads(info_with_layers(1000)) | {"backend": "b" * 100_000}
    body["layers"] = {"l" * 100_000: True, **body["layers"]}
    async with hostile(with_body(json.dumps(body).encode())) as (url, _):
        backend = RemoteBackend(Settings(api_url=url))
        try:
            health = await backend.health()
        finally:
            await backend.close()
    assert health.available
    assert len(health.layers) == 100
    assert max(map(len, [health.detail, *(layer.name for layer in health.layers)])) < 1000


@pytest.mark.parametrize("figure", ["1e400", "NaN", "9" * 400, '"x"', "[]", "{}"])
async def test_odd_figures_are_left_out(figure: str) -> None:
    body = f'{{"memory_mb": {figure}, "cpu_seconds": {figure}, "processes": {figure}}}'.encode()
    async with hostile(with_body(body)) as (url, _):
        backend = RemoteBackend(Settings(api_url=url, api_key=KEY))
        try:
            with suppress(SandboxError):
                await backend.usage("x")
        finally:
            await backend.close()


async def test_a_redirected_channel_takes_the_key_nowhere() -> None:
    """V14: whatever follows a redirect sends its headers along."""
    async with hostile(with_body(b"", status="404 None")) as (elsewhere, heads):
        target = f"Location: {elsewhere.replace('http', 'ws')}/stolen"
        async with hostile(with_body(b"", target, status="307 Go")) as (url, asked):
            backend = RemoteBackend(Settings(api_url=url, api_key=KEY))
            try:
                with pytest.raises(BackendUnavailableError, match="redirect.*SANDBOX_API_URL"):
                    await backend.connect("x")
            finally:
                await backend.close()
            assert KEY.encode() in asked[0]
        assert heads == []
