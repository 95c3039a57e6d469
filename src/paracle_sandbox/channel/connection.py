"""Run many operations of the guest at once over one byte stream. This is the host's end of it.

How it works. One connection belongs to one sandbox and lives in one event loop.

    callers                connection                           channel
    ─────────────────────────────────────────────────────────────────────
    call() ─┐                                      _flush
    call() ─┼─> Stream ──send()──> queue of frames ──────> send_now()
    open() ─┘     ^                                └─────> send()        the writer, a task
                  └────accept()─── _dispatch <──────────── receive()     the reader, a task

- The reader is a task that lives as long as the connection. It takes bytes from the channel, cuts
  them into frames, and gives each frame to the stream that its number names. It never waits for a
  caller: credit bounds what the guest may send ahead, so a stream can always store it. After a
  number of frames it lets other tasks run, because a guest may send without a pause.
- Sending needs no task at first. `send` queues a frame and asks the event loop to call `_flush` at
  the end of this turn, so that frames of the same turn travel together. What the channel does not
  accept without waiting is left to the writer, a task that ends when the queue is empty. A caller
  that sends much waits in `wait_until_drained` until less than a megabyte is queued.
- A caller waits in its stream, for the next frame or for credit. The reader wakes it.

Start: the guest speaks first. `start` waits for its HELLO on stream 0, and nothing else may arrive
on a stream that the host did not open.

End: the connection is lost once, for one reason (`_end_streams`): the guest ended, the guest broke
the protocol, the caller closed it, or the event loop ends. In this order every open stream fails
with that reason, queued frames are dropped, reader and writer are cancelled and awaited, and the
channel is closed last, because its descriptor's number could be reused while a task still watches
it.

Everything that the guest sends is hostile. A frame that does not belong ends this connection and
affects nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..audit import security_events
from ..errors import InvalidValueError, SandboxCreationError, SandboxError, SandboxExecutionError
from .base import Channel
from .errors import to_sandbox_error
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
_MAX_UNSENT_BYTES = 1 << 20
_MAX_STREAM = 0xFFFFFFFF
# Other tasks of the event loop have their turn after so many frames and after so many calls of
# receive(), which does not wait while the guest sends without a pause.
FRAMES_IN_A_ROW = 2048
RECEIVED_IN_A_ROW = 8
_STOPPED = "The sandbox was stopped"
_LOOP_ENDED = (
    "The event loop that the sandbox was started in has ended. Start a new sandbox in this loop"
)


class Connection:
    """The streams to one guest. Call `start` before anything else."""

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
        """Wait for the guest's HELLO and return it. Raises SandboxCreationError if none comes."""
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
        """Whether operations can be started: it is not lost and not closed."""
        return self._lost is None

    def open(self, op: Mapping[str, Any], after: Stream | None = None) -> Stream:
        """Start an operation. Its request is queued before this returns.

        The guest waits with it until the operation ``after`` has ended, if one is given. Raises
        SandboxExecutionError if the connection is lost, and ValueError if the request is larger
        than any that could start a program.
        """
        if self._lost is not None:
            raise self.lost_error()
        number = self._free_number()
        try:
            request = dict(op) if after is None else {**op, "after": after.number}
            frames = encode_request(number, request)
        except ProtocolError as error:
            raise InvalidValueError(
                f"The request is too large: {error}. Pass large data in a file or through stdin."
            ) from None
        make_error = partial(to_sandbox_error, op=op, sandbox_id=self._sandbox_id)
        stream = self._streams[number] = Stream(self, number, make_error, after)
        for frame in frames:
            self.send(frame)
        return stream

    async def call(self, op: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operation to its end and return its result. Raises what the guest reports."""
        with self.open(op) as stream:
            return await stream.finish()

    async def close(self, reason: str = _STOPPED) -> None:
        """Close the channel, which ends the guest. Open streams fail with ``reason``.

        A second call does nothing.
        """
        if self._closing is None and self._lost is not None and not self._running_tasks():
            await self._channel.close()  # no task uses it any more
        else:
            await asyncio.shield(self._lose(reason))

    def lose(self, reason: str = _STOPPED) -> None:
        """Fail all streams with ``reason`` and receive nothing more.

        The guest does not notice before `close` is called.
        """
        self._end_streams(reason)
        for task in self._running_tasks():
            task.cancel()

    # The methods that a stream calls (stream.Link).

    def send(self, frame: bytes) -> None:
        """Queue a frame. It leaves at the end of this turn of the event loop."""
        if self._lost is not None:
            return
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if self._flush_is_due or (self._writer is not None and not self._writer.done()):
            return
        with contextlib.suppress(RuntimeError):  # no event loop runs any more, so nothing is sent
            asyncio.get_running_loop().call_soon(self._flush)
            self._flush_is_due = True

    async def wait_until_drained(self) -> None:
        """Wait until less than _MAX_UNSENT_BYTES are queued, or the connection is lost."""
        while self._unsent_bytes > _MAX_UNSENT_BYTES and self._lost is None:
            waiter = asyncio.get_running_loop().create_future()
            self._drain_waiters.append(waiter)
            await waiter

    def break_off(self, reason: str) -> None:
        """End the connection because the guest broke the protocol, and record the event."""
        if self._lost is None:
            security_events.security_event("protocol", sandbox_id=self._sandbox_id, reason=reason)
            self._lose(f"the guest broke the protocol: {reason}")

    def lost_error(self) -> SandboxError:
        """Build the error of a stream whose connection is lost."""
        return SandboxExecutionError(self._lost or "The connection is lost", self._sandbox_id)

    # The reader and the writer.

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
            # Unless we are closing, the event loop ends, and no task reads on in the next one.
            if self._lost is None:
                self._end_streams(_LOOP_ENDED)
                self._channel.abandon()
            raise
        self._lose("The sandbox died")

    def _dispatch(self, kind: int, number: int, payload: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            self._accept_hello(kind, number, payload)
            return
        stream.accept(kind, payload)
        if stream.ended:
            del self._streams[number]

    def _accept_hello(self, kind: int, number: int, payload: bytes) -> None:
        """Accept the HELLO, which is the only frame outside of a stream, and comes once."""
        if kind != HELLO or number:
            raise ProtocolError(f"a frame for stream {number}, which is not open")
        if self._hello is None or self._greeted:
            raise ProtocolError("a second HELLO")
        self._greeted = True
        hello = decode_json(payload, MAX_ANSWER_ITEMS)
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(f"it does not speak protocol {PROTOCOL}")
        if not self._hello.done():  # start() may have given up
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
        self._wake_drain_waiters()

    async def _write(self) -> None:
        try:
            while self._unsent:
                batch = self._next_batch()
                await self._channel.send(batch)
                self._unsent_bytes -= len(batch)
                self._wake_drain_waiters()
        except OSError:
            self._lose("The sandbox died")
        except BaseException:
            self._end_streams("The sandbox died")  # the batch may have been sent in part
            raise

    def _next_batch(self) -> bytes:
        """Take the next bytes from the queue: one large frame, or several small ones joined."""
        first = self._unsent.popleft()
        if not self._unsent or len(first) > _SMALL_FRAME:
            return first
        batch, size = [first], len(first)
        while self._unsent and size + len(self._unsent[0]) <= _SMALL_FRAME:
            batch.append(self._unsent.popleft())
            size += len(batch[-1])
        return b"".join(batch)

    def _wake_drain_waiters(self) -> None:
        if self._unsent_bytes <= _MAX_UNSENT_BYTES or self._lost is not None:
            waiters, self._drain_waiters = self._drain_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _lose(self, reason: str) -> asyncio.Task[None]:
        """Fail all streams, and return the task that closes the channel.

        Only the first call acts.
        """
        if self._closing is None:
            self._end_streams(reason)
            self._closing = asyncio.create_task(self._close_channel())
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
        self._wake_drain_waiters()
        if self._hello is not None and not self._hello.done():
            self._hello.set_exception(self.lost_error())

    async def _close_channel(self) -> None:
        # The tasks end first: the number of a closed descriptor may be reused while they watch it.
        tasks = self._running_tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that still run. Others may belong to an event loop that has ended."""
        return [task for task in (self._reader, self._writer) if task and not task.done()]

    def _free_number(self) -> int:
        while True:
            self._last_number = self._last_number % _MAX_STREAM + 1
            if self._last_number not in self._streams:
                return self._last_number
