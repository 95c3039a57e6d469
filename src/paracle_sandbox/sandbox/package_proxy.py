"""Serves a package index to programs inside a sandbox, over its channel.

The guest listens on the loopback inside; each connection becomes a stream, and on it speaks a
very small HTTP server: one GET, one answer, the end. The place needs no network for that, and
gets none: what is asked for is looked up in the index and fetched by this side.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import IO, Any, TypeVar

from ..channel.connection import Connection
from ..channel.frames import DATA, EVENT
from ..channel.stream import Stream
from ..errors import SandboxError, SandboxExecutionError
from .package_index import NotOffered, PackageIndex

logger = logging.getLogger(__name__)

MAX_REQUEST = 16 << 10
_PIECE = 256 << 10
_REQUEST_SECONDS = 30.0
_MOMENT_SECONDS = 0.5
# Fetches of one installation at a time, and requests of programs inside that wait for one. pip
# asks for one thing after the other.
MAX_FETCHES = 4
MAX_WAITING = 64
# Requests at a time, with those that are told that there are too many.
MAX_ANSWERS = 4 * MAX_WAITING
# Of all installations. A thread ends only when the index answers or its patience is over, which
# may be long after the installation.
MAX_THREADS = 256

T = TypeVar("T")


class Fetches:
    """Runs what blocks on the index in threads of their own.

    The event loop's own threads are few, and files of all sandboxes are read and written in them:
    an index that answers slowly must not take them. These end with the process, whatever they wait
    for, so that nothing waits for the index when the service ends.
    """

    _threads = threading.BoundedSemaphore(MAX_THREADS)

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_FETCHES)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Raises NotOffered when there are too many, and what the work raises."""
        async with self._turns:
            if not self._threads.acquire(blocking=False):
                raise NotOffered(503, "too many packages are fetched at present")
            loop = asyncio.get_running_loop()
            done: asyncio.Future[T] = loop.create_future()
            thread = threading.Thread(
                target=self._work, args=(loop, done, work, args), name="paracle-index", daemon=True
            )
            try:
                thread.start()
            except BaseException:
                self._threads.release()
                raise
            return await done

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[T],
        work: Callable[..., T],
        args: tuple[object, ...],
    ) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work(*args)
        except Exception as error:  # noqa: BLE001  the waiter gets it, as with any thread pool
            failure = error
        finally:
            self._threads.release()
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(_tell, done, result, failure)


def _tell(done: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if done.cancelled():
        # No one waits any more: what was opened is closed here.
        if isinstance(result, tuple) and hasattr(result[1], "close"):
            result[1].close()
    elif failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)


@asynccontextmanager
async def serving(connection: Connection, index: PackageIndex) -> AsyncIterator[int]:
    """The port inside on which the index is to be had, for the length of the block."""
    answers: set[asyncio.Task[None]] = set()
    fetches = Fetches()
    with connection.open({"op": "listen"}) as listener:
        port = await _port(listener)
        taker = asyncio.create_task(_take(connection, listener, index, answers, fetches))
        try:
            yield port
        finally:
            taker.cancel()
            for answer in answers:
                answer.cancel()
            await asyncio.gather(taker, *answers, return_exceptions=True)


async def _port(listener: Stream) -> int:
    async for kind, payload in listener:
        port = listener.short_event(payload).get("port") if kind == EVENT else None
        if not isinstance(port, int) or not 0 < port < 1 << 16:
            raise listener.refuse("a port that is none")
        return port
    raise SandboxExecutionError("The sandbox does not listen")


async def _take(
    connection: Connection,
    listener: Stream,
    index: PackageIndex,
    answers: set[asyncio.Task[None]],
    fetches: Fetches,
) -> None:
    async for kind, payload in listener:
        number = listener.short_event(payload).get("connection") if kind == EVENT else None
        if not isinstance(number, int):
            raise listener.refuse("a connection that is none")
        # A guest that lies could name connections without end; what it says is not read meanwhile.
        while len(answers) >= MAX_ANSWERS:
            await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        stream = connection.open({"op": "accept", "connection": number})
        is_busy = len(answers) >= MAX_WAITING
        answer = asyncio.create_task(_answer(stream, index, None if is_busy else fetches))
        answers.add(answer)
        answer.add_done_callback(answers.discard)


async def _answer(stream: Stream, index: PackageIndex, fetches: Fetches | None) -> None:
    """Without ``fetches`` there are too many already."""
    with stream:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                line = await _request_line(stream)
            if fetches is None:
                await _send(stream, 503, "text/plain", b"too many requests at a time\n")
            else:
                await _respond(stream, line, index, fetches)
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


async def _respond(stream: Stream, line: str, index: PackageIndex, fetches: Fetches) -> None:
    method, _, rest = line.partition(" ")
    path = rest.partition(" ")[0]
    if method not in ("GET", "HEAD"):
        await _send(stream, 405, "text/plain", b"only GET\n")
        return
    try:
        kind, content = await fetches.run(index.open, path)
    except NotOffered as refusal:
        await _send(stream, refusal.status, "text/plain", f"{refusal}\n".encode())
        return
    if isinstance(content, bytes):
        await _send(stream, 200, kind, content)
    else:
        await _pass_on(stream, kind, content, fetches)


async def _pass_on(stream: Stream, kind: str, file: IO[bytes], fetches: Fetches) -> None:
    length = file.headers.get("content-length")  # type: ignore[attr-defined]
    reading = False
    try:
        await stream.write(_head(200, kind, int(length) if length else None))
        while True:
            reading = True
            piece = await fetches.run(_read_some, file)
            reading = False
            if not piece or not await stream.write(piece):
                return
    finally:
        if not reading:  # else a thread still reads it, and it goes with that
            file.close()


def _read_some(file: IO[bytes]) -> bytes:
    """Return what comes within a moment; b"" at the end. A slow index must not keep the thread for
    a whole piece, nor have one started for each byte."""
    held = b""
    until = time.monotonic() + _MOMENT_SECONDS
    while len(held) < _PIECE and time.monotonic() < until:
        piece = file.read1(_PIECE)  # type: ignore[attr-defined]
        if not piece:
            break
        held += piece
    return held


async def _send(stream: Stream, status: int, kind: str, body: bytes) -> None:
    await stream.write(_head(status, kind, len(body)) + body)


def _head(status: int, kind: str, length: int | None) -> bytes:
    lines = [f"HTTP/1.1 {status} -", f"Content-Type: {kind}", "Connection: close"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
