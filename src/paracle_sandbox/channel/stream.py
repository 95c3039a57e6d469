"""One stream of a connection: one operation of the guest, from OPEN to RESULT or ERROR.

The connection's reader puts frames in, and one consumer takes them out. Credit bounds the bytes
that wait in between. Small frames are merged, so that a flood of one-byte frames costs no more
memory than its bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import SandboxError
from .frames import (
    CHUNK,
    CREDIT,
    CREDITED,
    DATA,
    END,
    ERROR,
    EVENT,
    MAX_ANSWER_ITEMS,
    MAX_EVENT_ITEMS,
    RESULT,
    SIGNAL,
    WINDOW,
    ProtocolError,
    decode_credit,
    decode_json,
    encode,
    encode_credit,
    encode_header,
    encode_json,
)

_GIVE_BACK = WINDOW // 4
# When more frames than this wait, a small one joins the last of its kind, even if a frame of
# another kind came between them.
_MANY_FRAMES = 1024
_MAX_EVENTS = 16384
# A guest that sends megabytes of JSON for a pid would hold up the event loop.
_MAX_SHORT_EVENT = 1024


class Link(Protocol):
    """The methods of the connection that a stream calls."""

    def send(self, frame: bytes) -> None: ...
    async def wait_until_drained(self) -> None: ...
    def break_off(self, reason: str) -> None: ...
    def lost_error(self) -> SandboxError: ...


class _QueuedFrame:
    """A frame that waits for the consumer. Its payload may grow by later frames."""

    __slots__ = ("kind", "payload")

    def __init__(self, kind: int, payload: bytes | bytearray) -> None:
        self.kind = kind
        self.payload = payload


class Stream:
    """One operation of the guest, as its caller sees it.

    Iterate over it to get (kind, payload) of its DATA, STDERR and EVENT frames. After that
    ``result`` is set, or the guest's error is raised. Leaving its ``with`` block before the end
    cancels the operation.
    """

    def __init__(
        self,
        link: Link,
        number: int,
        make_error: Callable[[dict[str, Any]], SandboxError],
        after: Stream | None = None,
    ) -> None:
        self.number = number
        self.ended = False
        self.result: dict[str, Any] = {}
        self.failure: dict[str, Any] | None = None  # the payload of an ERROR frame
        self._link = link
        self._after = after
        self._make_error = make_error
        self._error: Callable[[], SandboxError] | None = None
        self._queue: deque[_QueuedFrame] = deque()
        self._last: dict[int, _QueuedFrame] = {}
        self._held_bytes = 0
        self._held_events = 0
        self._guest_room = WINDOW
        self._owed = 0
        self._room = WINDOW
        self._released = False
        self._abandoned = False
        self._consumer: asyncio.Future[None] | None = None
        self._producer: asyncio.Future[None] | None = None

    # The methods that the connection's reader calls.

    def accept(self, kind: int, payload: bytes) -> None:
        """Accept one frame from the guest. Raises ProtocolError if it does not belong here."""
        if kind in CREDITED:
            self._enqueue(kind, payload)
        elif kind == CREDIT:
            self._add_credit(decode_credit(payload))
        elif kind == RESULT:
            self.result = decode_json(payload, MAX_ANSWER_ITEMS)
            self._end(None)
        elif kind == ERROR:
            self.failure = decode_json(payload, MAX_ANSWER_ITEMS)
            error = self._make_error(self.failure)
            self._end(lambda: error)
        else:
            raise ProtocolError(f"frame type {kind} does not belong to a stream")

    def lose(self) -> None:
        """Fail, because the connection is lost."""
        if not self.ended:
            self._end(self._link.lost_error)

    def _end(self, error: Callable[[], SandboxError] | None) -> None:
        self.ended = True
        self._error = error
        self._wake_consumer()
        self._wake_producer()

    def _enqueue(self, kind: int, payload: bytes) -> None:
        size = len(payload)
        if not size:
            raise ProtocolError("an empty frame")
        # The consumer does not read yet: what a lying guest sends would stay in memory for hours.
        if self._after is not None and not self._after.ended:
            raise ProtocolError("a response before its turn")
        self._after = None
        # The last frame may exceed what is left, because a sender cannot cut an EVENT.
        if self._guest_room <= 0:
            raise ProtocolError("more data than its credit")
        self._guest_room -= size
        if self._released:
            self._give_back(size)
            if self._abandoned or self._held_bytes >= WINDOW:
                return
        self._held_bytes += size
        if kind == EVENT:
            self._held_events += 1
            if self._held_events > _MAX_EVENTS:
                raise ProtocolError("too many events")
        if not self._merge_into_last(kind, payload):
            self._last[kind] = held = _QueuedFrame(kind, payload)
            self._queue.append(held)
        self._wake_consumer()

    def _merge_into_last(self, kind: int, payload: bytes) -> bool:
        last = self._last.get(kind)
        if last is None or kind == EVENT or len(last.payload) + len(payload) > CHUNK:
            return False
        if last is not self._queue[-1] and len(self._queue) < _MANY_FRAMES:
            return False
        if isinstance(last.payload, bytes):
            last.payload = bytearray(last.payload)
        last.payload += payload
        return True

    def _add_credit(self, amount: int) -> None:
        self._room += amount
        if not amount or self._room > WINDOW:
            raise ProtocolError("a credit that was not owed")
        self._wake_producer()

    # The methods that the consumer calls.

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[int, bytes]:
        while not self._queue:
            if self.ended:
                if self._error is not None:
                    raise self._error()
                raise StopAsyncIteration
            self._consumer = asyncio.get_running_loop().create_future()
            await self._consumer
        return self._take()

    def _take(self) -> tuple[int, bytes]:
        held = self._queue.popleft()
        if self._last.get(held.kind) is held:
            del self._last[held.kind]
        size = len(held.payload)
        self._held_bytes -= size
        self._held_events -= held.kind == EVENT
        if not self._released:
            self._give_back(size)
        return held.kind, bytes(held.payload)

    async def finish(self) -> dict[str, Any]:
        """Skip all frames and return the result. Raises the guest's error."""
        async for _ in self:
            pass
        return self.result

    def refuse(self, reason: str) -> SandboxError:
        """End the connection, because the guest's response makes no sense.

        The caller has to raise the error that this returns.
        """
        self._link.break_off(reason)
        return self._link.lost_error()

    def event(self, payload: bytes) -> dict[str, Any]:
        """Decode the payload of an EVENT."""
        try:
            return decode_json(payload, MAX_EVENT_ITEMS)
        except ProtocolError as error:
            raise self.refuse(str(error)) from None

    def short_event(self, payload: bytes) -> dict[str, Any]:
        """Decode the payload of an EVENT that holds only a number or two."""
        if len(payload) > _MAX_SHORT_EVENT:
            raise self.refuse("an event that is too long")
        return self.event(payload)

    def _give_back(self, size: int) -> None:
        self._owed += size
        if self._owed >= _GIVE_BACK and not self.ended:
            self._guest_room += self._owed
            self._link.send(encode_credit(self.number, self._owed))
            self._owed = 0

    # The methods that the producer calls.

    async def write(self, data: bytes | bytearray | memoryview) -> bool:
        """Send the data as DATA frames, as fast as the guest accepts them.

        Returns False if the stream has ended and the guest accepts no more; iterate to learn why.
        """
        view = memoryview(data).cast("B")
        while len(view) and not self.ended:
            if not self._room:
                self._producer = asyncio.get_running_loop().create_future()
                await self._producer
                continue
            piece = view[: min(self._room, CHUNK)]
            view = view[len(piece) :]
            self._room -= len(piece)
            self._link.send(b"".join((encode_header(DATA, self.number, len(piece)), piece)))
            await self._link.wait_until_drained()
        return not self.ended

    def end(self) -> None:
        """Tell the guest that no more DATA will come."""
        if not self.ended:
            self._link.send(encode(END, self.number))

    def signal(self, value: dict[str, Any]) -> None:
        """Send a SIGNAL: a kill, a signal for the program, or the size of its terminal."""
        if not self.ended:
            self._link.send(encode_json(SIGNAL, self.number, value))

    def release(self) -> None:
        """Let the operation end however slow the consumer is.

        From now on credit is given back on arrival, and output beyond one window is dropped.
        """
        if not self._released:
            self._released = True
            self._give_back(self._held_bytes)

    def abandon(self) -> None:
        """Cancel the operation and drop everything that it still sends."""
        self.signal({"kill": True})
        self.release()
        self._abandoned = True
        self._queue.clear()
        self._last.clear()
        self._held_bytes = self._held_events = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _wake_consumer(self) -> None:
        if self._consumer is not None and not self._consumer.done():
            self._consumer.set_result(None)

    def _wake_producer(self) -> None:
        if self._producer is not None and not self._producer.done():
            self._producer.set_result(None)
