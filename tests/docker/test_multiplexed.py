"""M12: an attached stream whose headers lie. The client is the real one, the engine is a script."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paracle_sandbox.backends.base import Channel
from paracle_sandbox.backends.docker.engine import Engine
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.case("M12")

Talk = Callable[[asyncio.StreamWriter], Awaitable[None]]
VERSION = b'{"ApiVersion": "1.41"}'
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
MB = 1 << 20


def header(stream: int, length: int, padding: bytes = b"\0\0\0") -> bytes:
    return struct.pack(">B3sL", stream, padding, length)


def said(*texts: bytes) -> bytes:
    return b"".join(header(1, len(text)) + text for text in texts)


@contextlib.asynccontextmanager
async def attached(
    tmp_path: Path, talk: Talk, *, with_the_upgrade: bool = False
) -> AsyncIterator[Channel]:
    """A channel to an engine that says ``talk`` over an attached connection: afterwards, as one
    does whose container is started then, or in one breath with its answer."""
    writers = []

    is_attached = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while asked := await reader.readuntil(b"\r\n\r\n"):
                if b"/attach" in asked.splitlines()[0]:
                    writer.write(UPGRADED)
                    if not with_the_upgrade:
                        await is_attached.wait()
                    await talk(writer)
                    await reader.read()
                    break
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(VERSION)}\r\n\r\n"
                writer.write(head.encode() + VERSION)
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "sock")
    engine = Engine(Settings(docker_host=f"unix://{tmp_path}/sock"))
    channel = None
    try:
        async with asyncio.timeout(20):
            channel = await engine.attach("some")
            is_attached.set()
            yield channel
    finally:
        if channel is not None:
            await channel.close()
        await engine.close()
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
        await asyncio.sleep(0)


def saying(data: bytes, *, hangs_up: bool = False) -> Talk:
    async def talk(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if hangs_up:
            writer.close()

    return talk


async def all_of(channel: Channel) -> bytes:
    received = b""
    while piece := await channel.receive():
        received += piece
    return received


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8, 9, 1000, 9999])
async def test_what_is_well_said_arrives_however_it_is_cut(
    tmp_path: Path, size: int, at_once: bool
) -> None:
    data = said(b"first", b"", b"x" * 3000) + header(2, 5) + b"words" + said(b"last")

    async def talk(writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with attached(tmp_path, talk, with_the_upgrade=at_once) as channel:
        assert await all_of(channel) == b"first" + b"x" * 3000 + b"last"
        assert channel.last_words == "words"  # type: ignore[attr-defined]


NO_HEADERS = {
    "an unknown stream": header(7, 5) + b"12345",
    "a stream of 255": b"\xff" * 64,
    "padding": header(1, 5, b"\0\1\0") + b"12345",
    "a terminal's output": b"plain text of a program\r\n",
    "HTTP": b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
    "stdin": header(0, 5) + b"12345",
    "a length that is too short": header(1, 3) + b"12345678901234567890",
}


@pytest.mark.parametrize("data", NO_HEADERS.values(), ids=NO_HEADERS)
async def test_what_is_no_header_ends_the_channel(tmp_path: Path, data: bytes) -> None:
    """Also while the engine keeps the connection open; what came before is not lost."""
    async with attached(tmp_path, saying(said(b"good") + data)) as channel:
        received = await all_of(channel)
        assert received in (b"good", b"good123"), received
        assert await channel.receive() == b""


async def test_an_end_in_the_middle_is_an_end(tmp_path: Path) -> None:
    for data in (said(b"good") + header(1, 4)[:5], said(b"good") + header(1, 400)):
        async with attached(tmp_path, saying(data, hangs_up=True)) as channel:
            assert await all_of(channel) == b"good"
        (tmp_path / "sock").unlink()


@pytest.mark.parametrize("stream", [1, 2])
async def test_a_length_of_four_gigabytes_takes_no_memory(tmp_path: Path, stream: int) -> None:
    """Output is passed on as it comes, and the engine waits while nobody takes it."""
    sent = 0

    async def talk(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(header(stream, 0xFFFFFFFF))
        for _ in range(256):
            writer.write(bytes(MB))
            await writer.drain()
            sent += MB
        writer.close()

    async with attached(tmp_path, talk) as channel:
        first = asyncio.ensure_future(channel.receive())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        received = len(await first)
        if stream == 1:
            assert 0 < received <= MB
            assert sent < 64 * MB, "it was read ahead of whoever wants it"
            while piece := await channel.receive():
                received += len(piece)
            assert received == 256 * MB
        assert sent == 256 * MB
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
