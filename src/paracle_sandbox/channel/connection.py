"""The host's end of a channel: many operations at once over one byte stream.

The reader, a task, takes frames off the channel and hands them to their streams; it never waits
for a consumer, because credit bounds what can arrive. Frames of one turn of the event loop are sent
together at its end; what the channel does not take at once is left to the writer, a task that lives
as long as there is something to send. Everything the guest says is hostile: a frame that does not
fit breaks the connection off, every open stream learns it, and nothing else is affected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..audit import security_events
from ..errors import SandboxCreationError, SandboxError, SandboxExecutionError
from ..invalid import InvalidValueError
from .base import Channel
from .errors import failure
from .frames import (
    HELLO,
    MAX_ANSWER_ITEMS,
    TO_HOST,
    FrameReader,
    ProtocolError,
    decode_json,
    encode_request,
)
from .stream import Stream

PROTOCOL = 1
HELLO_SECONDS = 30.0
_SMALL_FRAME = 64 << 10
_MUCH_UNSENT = 1 << 20
_MAX_STREAM = 0xFFFFFFFF
# A guest that floods us shares the loop: others have their turn after so many frames, and after so
# many times that something was there to be received, which may not have had to wait for it.
FRAMES_IN_A_ROW = 2048
RECEIVED_IN_A_ROW = 8
_STOPPED = "The sandbox was stopped"
_LOOP_ENDED = "The event loop that the sandbox was started in has ended; start one in this loop"


class Connection:
    """Streams to one guest. ``await start()`` first."""

    def __init__(self, channel: Channel, sandbox_id: str) -> None:
        self._channel = channel
        self._sandbox_id = sandbox_id
        self._frames = FrameReader(TO_HOST)
        self._streams: dict[int, Stream] = {}
        self._last_number = 0
        self._lost: str | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._flush_is_due = False
        self._writer: asyncio.Task[None] | None = None
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._hello: asyncio.Future[dict[str, Any]] | None = None
        self._greeted = False
        self._reader: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self, timeout_seconds: float = HELLO_SECONDS) -> dict[str, Any]:
        """Wait for the guest's HELLO. Raises SandboxCreationError when none comes."""
        self._hello = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._hello
        except TimeoutError:
            await self.close("The guest did not answer")
            raise SandboxCreationError(
                f"The guest did not answer within {timeout_seconds:g} seconds",
                self._sandbox_id,
                step="guest",
            ) from None
        except SandboxExecutionError as error:
            await self.close("The guest did not start")
            raise SandboxCreationError(
                f"The guest did not start: {error}", self._sandbox_id, step="guest"
            ) from error

    @property
    def is_open(self) -> bool:
        return self._lost is None

    def open(self, op: Mapping[str, Any], after: Stream | None = None) -> Stream:
        """Begin an operation, ``after`` the end of another if one is named; the frame is queued at
        once. Raises SandboxExecutionError when the connection is lost, ValueError when the request
        is larger than any that a program could be started with."""
        if self._lost is not None:
            raise self.lost_error()
        number = self._free_number()
        try:
            request = dict(op) if after is None else {**op, "after": after.number}
            frames = encode_request(number, request)
        except ProtocolError as error:
            raise InvalidValueError(
                f"The request is too large: {error}. Write what is large to a file, or to stdin."
            ) from None
        make_error = partial(failure, op=op, sandbox_id=self._sandbox_id)
        stream = self._streams[number] = Stream(self, number, make_error, after)
        for frame in frames:
            self.send(frame)
        return stream

    async def call(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """One question, one answer."""
        with self.open(op) as stream:
            return await stream.finish()

    async def close(self, reason: str = _STOPPED) -> None:
        """Idempotent. The guest ends when its channel does; open streams end with ``reason``."""
        if self._closing is None and self._lost is not None and not self._tasks():
            await self._channel.close()  # nobody else is left who uses it
        else:
            await asyncio.shield(self._lose(reason))

    def lose(self, reason: str = _STOPPED) -> None:
        """End all streams with ``reason``, and hear no more. Only `close` tells the guest."""
        self._end_streams(reason)
        for task in self._tasks():
            task.cancel()

    # What a stream needs (stream.Link).

    def send(self, frame: bytes) -> None:
        """Queue a frame."""
        if self._lost is not None:
            return
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if self._flush_is_due or (self._writer is not None and not self._writer.done()):
            return
        with contextlib.suppress(RuntimeError):  # no event loop runs any more: nobody would send
            asyncio.get_running_loop().call_soon(self._flush)
            self._flush_is_due = True

    async def drained(self) -> None:
        """Wait until most of what was queued is on its way."""
        while self._unsent_bytes > _MUCH_UNSENT and self._lost is None:
            waiter = asyncio.get_running_loop().create_future()
            self._drain_waiters.append(waiter)
            await waiter

    def break_off(self, reason: str) -> None:
        """The guest broke the protocol."""
        if self._lost is None:
            security_events.security_event("protocol", sandbox_id=self._sandbox_id, reason=reason)
            self._lose(f"the guest broke the protocol: {reason}")

    def lost_error(self) -> SandboxError:
        return SandboxExecutionError(self._lost or "The connection is lost", self._sandbox_id)

    # Reader and writer.

    async def _read(self) -> None:
        received = frames = 0
        try:
            while data := await self._channel.receive():
                for kind, number, payload in self._frames.feed(data):
                    self._dispatch(kind, number, payload)
                    frames += 1
                    if frames % FRAMES_IN_A_ROW == 0:
                        await asyncio.sleep(0)
                received += 1
                if received % RECEIVED_IN_A_ROW == 0:
                    await asyncio.sleep(0)
        except ProtocolError as error:
            self.break_off(str(error))
        except OSError:
            pass
        except asyncio.CancelledError:
            # Unless we are closing, the event loop ends. Nobody would read an answer in the next.
            if self._lost is None:
                self._end_streams(_LOOP_ENDED)
                self._channel.abandon()
            raise
        self._lose("The sandbox died")

    def _dispatch(self, kind: int, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            self._greet(kind, number, payload)
            return
        stream.accept(kind, payload)
        if stream.ended:
            del self._streams[number]

    def _greet(self, kind: int, number: int, payload: bytes) -> None:
        """The only frame outside a stream is the HELLO, once."""
        if kind != HELLO or number:
            raise ProtocolError(f"a frame for stream {number}, which is not open")
        if self._hello is None or self._greeted:
            raise ProtocolError("a second HELLO")
        self._greeted = True
        hello = decode_json(payload, MAX_ANSWER_ITEMS)
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(f"it does not speak protocol {PROTOCOL}")
        if not self._hello.done():  # else nobody waits for it any more
            self._hello.set_result(hello)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._lost is not None:
            return
        while self._unsent:
            batch = self._next_batch()
            sent = self._channel.send_now(batch)
            self._unsent_bytes -= sent
            if sent < len(batch):
                self._unsent.appendleft(batch[sent:])
                self._writer = asyncio.create_task(self._write())
                break
        self._wake_drained()

    async def _write(self) -> None:
        try:
            while self._unsent:
                batch = self._next_batch()
                await self._channel.send(batch)
                self._unsent_bytes -= len(batch)
                self._wake_drained()
        except OSError:
            self._lose("The sandbox died")
        except BaseException:
            self._end_streams("The sandbox died")  # what was about to be sent is lost
            raise

    def _next_batch(self) -> bytes:
        """Small frames that wait together travel together."""
        first = self._unsent.popleft()
        if not self._unsent or len(first) > _SMALL_FRAME:
            return first
        batch, size = [first], len(first)
        while self._unsent and size + len(self._unsent[0]) <= _SMALL_FRAME:
            batch.append(self._unsent.popleft())
            size += len(batch[-1])
        return b"".join(batch)

    def _wake_drained(self) -> None:
        if self._unsent_bytes <= _MUCH_UNSENT or self._lost is not None:
            waiters, self._drain_waiters = self._drain_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _lose(self, reason: str) -> asyncio.Task[None]:
        """End everything, once; the task that lets go of the channel."""
        if self._closing is None:
            self._end_streams(reason)
            self._closing = asyncio.create_task(self._let_go())
        return self._closing

    def _end_streams(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lose()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._wake_drained()
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(self.lost_error())

    async def _let_go(self) -> None:
        # The tasks first: a closed descriptor's number may be another's by the time they look.
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    def _tasks(self) -> list[asyncio.Task[None]]:
        """Done ones are left alone: they may belong to an event loop that has ended."""
        return [task for task in (self._reader, self._writer) if task and not task.done()]

    def _free_number(self) -> int:
        while True:
            self._last_number = self._last_number % _MAX_STREAM + 1
            if self._last_number not in self._streams:
                return self._last_number
