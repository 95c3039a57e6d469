"""Serves a package index to programs inside a sandbox, over its channel.

The guest listens on the loopback inside; each connection becomes a stream, and on it speaks a
very small HTTP server: one GET, one answer, the end. The place needs no network for that, and
gets none: what is asked for is looked up in the index and fetched by this side.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from .channel.connection import Connection
from .channel.frames import DATA, EVENT
from .channel.stream import Stream
from .errors import SandboxError, SandboxExecutionError
from .package_index import NotOffered, PackageIndex

logger = logging.getLogger(__name__)

MAX_REQUEST = 16 << 10
_PIECE = 256 << 10
_REQUEST_SECONDS = 30.0


@asynccontextmanager
async def serving(connection: Connection, index: PackageIndex) -> AsyncIterator[int]:
    """The port inside on which the index is to be had, for the length of the block."""
    answers: set[asyncio.Task[None]] = set()
    with connection.open({"op": "listen"}) as listener:
        port = await _port(listener)
        taker = asyncio.create_task(_take(connection, listener, index, answers))
        try:
            yield port
        finally:
            taker.cancel()
            for answer in answers:
                answer.cancel()
            await asyncio.gather(taker, *answers, return_exceptions=True)


async def _port(listener: Stream) -> int:
    async for kind, payload in listener:
        port = listener.news(payload).get("port") if kind == EVENT else None
        if not isinstance(port, int) or not 0 < port < 1 << 16:
            raise listener.refuse("a port that is none")
        return port
    raise SandboxExecutionError("The sandbox does not listen")


async def _take(
    connection: Connection, listener: Stream, index: PackageIndex, answers: set[asyncio.Task[None]]
) -> None:
    async for kind, payload in listener:
        number = listener.news(payload).get("connection") if kind == EVENT else None
        if not isinstance(number, int):
            raise listener.refuse("a connection that is none")
        stream = connection.open({"op": "accept", "connection": number})
        answer = asyncio.create_task(_answer(stream, index))
        answers.add(answer)
        answer.add_done_callback(answers.discard)


async def _answer(stream: Stream, index: PackageIndex) -> None:
    with stream:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                line = await _request_line(stream)
            await _respond(stream, line, index)
            stream.end()
            await stream.finish()
        except (SandboxError, TimeoutError, OSError, http.client.HTTPException) as error:
            logger.debug("An installer's request was not answered: %s", error)


async def _request_line(stream: Stream) -> str:
    """The first line of a request whose headers have come; the headers do not matter."""
    held = b""
    async for kind, payload in stream:
        if kind != DATA:
            raise stream.refuse("a request that cannot be")
        held += payload
        if b"\r\n\r\n" in held:
            return held.partition(b"\r\n")[0].decode("latin-1")
        if len(held) > MAX_REQUEST:
            break
    return ""


async def _respond(stream: Stream, line: str, index: PackageIndex) -> None:
    method, _, rest = line.partition(" ")
    path = rest.partition(" ")[0]
    if method not in ("GET", "HEAD"):
        await _send(stream, 405, "text/plain", b"only GET\n")
        return
    try:
        kind, content = await asyncio.to_thread(index.open, path)
    except NotOffered as refusal:
        await _send(stream, refusal.status, "text/plain", f"{refusal}\n".encode())
        return
    if isinstance(content, bytes):
        await _send(stream, 200, kind, content)
    else:
        await _pass_on(stream, kind, content)


async def _pass_on(stream: Stream, kind: str, file: IO[bytes]) -> None:
    length = file.headers.get("content-length")  # type: ignore[attr-defined]
    with file:
        await stream.write(_head(200, kind, int(length) if length else None))
        while piece := await asyncio.to_thread(file.read, _PIECE):
            if not await stream.write(piece):
                return


async def _send(stream: Stream, status: int, kind: str, body: bytes) -> None:
    await stream.write(_head(status, kind, len(body)) + body)


def _head(status: int, kind: str, length: int | None) -> bytes:
    lines = [f"HTTP/1.1 {status} -", f"Content-Type: {kind}", "Connection: close"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
