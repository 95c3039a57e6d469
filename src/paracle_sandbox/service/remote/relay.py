"""Bytes between a remote client's WebSocket and the guest of its sandbox.

The relay outlives the WebSocket: it reads from the guest while its outbox has room, and a client
that comes back gets what it missed. It reads the client's requests frame by frame before it passes
them on: an execution counts against the user's quota and is logged, however it ends. A malformed
frame ends the relay.

The relay itself answers a request over the quota, in the guest's place. Such a refusal must not
split a frame of the guest, so the guest's frames are passed on whole and refusals go between them.
A refusal waits for room in the outbox, but the reader of requests does not wait for it, because the
acknowledgements that make room arrive the same way. A client with more refusals than may wait
ends the relay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from contextvars import copy_context

from ...backends.base import Channel
from ...channel.connection import FRAMES_IN_A_ROW, RECEIVED_IN_A_ROW
from ...channel.frames import (
    DATA,
    ERROR,
    MAX_ANSWER_ITEMS,
    MAX_REQUEST_ITEMS,
    OPEN,
    RESULT,
    TO_GUEST,
    TO_HOST,
    FrameReader,
    ProtocolError,
    decode_json,
    encode,
    encode_json,
    request_frames,
)
from ...channel.resumable import (
    END_MESSAGE,
    MAX_MESSAGE,
    Inbox,
    Outbox,
    OutOfStep,
    acknowledgement,
    count_of,
    data_message,
    parse,
)
from ..errors import TooMany
from ..journal import Journal
from ..metrics import Metrics
from ..users.quotas import Executions

SendBytes = Callable[[bytes], Awaitable[None]]
# The part of a program that the log has.
_MAX_CONTENT = 1 << 20
# Our client puts 64 KiB of small frames into a message, which are seven thousand at most.
_MAX_FRAMES = 16384
# After so many frames in a row, other tasks run.
_ASKED_IN_A_ROW = 512
_GOODBYE_SECONDS = 1.0
_PROGRAMS = {"exec": "shell", "python": "python"}


class Relay:
    """One guest's channel, lent to one client at a time."""

    def __init__(
        self,
        channel: Channel,
        user_id: str,
        name: str,
        executions: Executions,
        journal: Journal,
        metrics: Metrics,
        on_failure: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._outbox = Outbox()
        self._inbox = Inbox()
        self._refusals = bytearray()  # whole frames, to be put where a frame of the guest has ended
        self._in_frame = False
        self._asked = Watch(user_id, name, executions, journal, metrics, self._answer, on_failure)
        self._send: SendBytes | None = None
        self._sending = asyncio.Lock()
        self._taking = asyncio.Lock()
        self._patience: asyncio.Timeout | None = None
        self._reader: asyncio.Task[None] | None = None
        self._over = False
        self._holder = 0
        self.unheld_since = time.monotonic()

    @property
    def is_held(self) -> bool:
        return self._send is not None

    def start(self) -> None:
        self._reader = asyncio.create_task(self._read_guest())

    async def close(self) -> None:
        self._over = True
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        await self._channel.close()
        # A client that does not read must not delay the end.
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._tell(END_MESSAGE)
        self._asked.close("removed")

    # The guest's side

    async def _read_guest(self) -> None:
        received = 0
        while data := await self._channel.receive():
            received += 1
            if received % RECEIVED_IN_A_ROW == 0:
                await asyncio.sleep(0)
            whole = await self._asked.pass_answers(data)
            await self._outbox.wait_for_room()
            await self._put_refusals()
            for start in range(0, len(whole), MAX_MESSAGE):
                await self._outbox.wait_for_room()
                end = start + MAX_MESSAGE
                await self._put(whole[start:end], end < len(whole) or self._asked.gave_up)
            await self._put_refusals()
        self._over = True
        self._asked.close("sandbox_lost")
        await self._tell(END_MESSAGE)

    async def _put(self, piece: bytes, in_frame: bool) -> None:
        """Send a piece of the guest's bytes, which with ``in_frame`` ends within a frame."""
        async with self._sending:
            self._in_frame = in_frame
            self._outbox.put(piece)
            await self._deliver(data_message(piece))

    async def _answer(self, frame: bytes) -> None:
        """Send an answer of our own, in the guest's place. Raises ProtocolError."""
        if self._over:
            return
        if self._asked.gave_up:
            raise ProtocolError("the guest's frames have no end that an answer could follow")
        if len(self._refusals) + len(frame) > MAX_MESSAGE:
            raise ProtocolError("more requests over the quota than answers that were read")
        self._refusals += frame
        await self._put_refusals()

    async def _put_refusals(self) -> None:
        """Send the refusals, if there is room and no frame is open; otherwise the end of the frame
        or the next acknowledgement calls this again."""
        async with self._sending:
            if self._over or self._in_frame or not self._refusals or not self._outbox.has_room:
                return
            piece = bytes(self._refusals)
            self._refusals.clear()
            self._outbox.put(piece)
            await self._deliver(data_message(piece))

    async def _break_off(self) -> None:
        """End a relay whose client broke the protocol, and say so: it would resume otherwise."""
        self._over = True
        if self._reader is not None:
            self._reader.cancel()
        await self._tell(END_MESSAGE)

    async def _tell(self, message: bytes) -> None:
        async with self._sending:
            await self._deliver(message)

    async def _deliver(self, message: bytes) -> None:
        if self._send is None:
            return
        try:
            async with asyncio.timeout(None) as self._patience:
                await self._send(message)
        except Exception:  # noqa: BLE001  however it broke, the client is gone
            self._send = None
            self.unheld_since = time.monotonic()

    # The client's side

    async def attach(self, send: SendBytes, received: int) -> int:
        """Attach a client that has so many bytes already; a client before it is detached. Raises
        OutOfStep. Returns the number of the holder, for detach()."""
        if self._patience is not None and self._send is not None:
            # The client before may hang on a connection whose other end is long gone.
            with suppress(RuntimeError):  # nothing is being sent
                self._patience.reschedule(0)
        # First let a message that is being passed on get through: then the count is exact.
        async with self._taking, self._sending:
            self._outbox.acknowledge(received)
            self._send = send
            self._holder += 1
            await self._deliver(acknowledgement(self._inbox.received))
            for piece in self._outbox.pending():
                await self._deliver(data_message(piece))
            if self._over:
                await self._deliver(END_MESSAGE)
            holder = self._holder
        await self._put_refusals()
        return holder

    def detach(self, holder: int) -> None:
        if holder == self._holder:
            self._send = None
            self.unheld_since = time.monotonic()

    async def take(self, message: bytes, holder: int) -> None:
        """Take one message of a client. Raises OutOfStep, also when another client has the channel
        by now: messages of the broken connection are sent again over the new one."""
        kind, payload = parse(message)
        async with self._taking:
            if holder != self._holder:
                raise OutOfStep("the channel is held by another connection")
            if kind == "a":
                self._outbox.acknowledge(count_of(payload))
                await self._put_refusals()
            elif kind == "d":
                await self._pass_on(payload)

    async def _pass_on(self, payload: bytes) -> None:
        told = self._inbox.take(len(payload))
        if told is not None:
            await self._tell(told)
        try:
            passed = await self._asked.pass_requests(payload)
        except ProtocolError as error:
            await self._break_off()
            raise OutOfStep(str(error)) from None
        if passed and not self._over:
            with suppress(OSError):
                await self._channel.send(passed)


class Watch:
    """Reads the requests to the guest for quota and log. ``on_failure`` is called when a program
    failed."""

    def __init__(
        self,
        user_id: str,
        name: str,
        executions: Executions,
        journal: Journal,
        metrics: Metrics,
        answer: Callable[[bytes], Awaitable[None]],
        on_failure: Callable[[], None],
    ) -> None:
        self._user_id = user_id
        self._name = name
        self._executions = executions
        self._journal = journal
        self._metrics = metrics
        self._answer = answer
        self._on_failure = on_failure
        self._asked = FrameReader(TO_GUEST)
        self._answers: FrameReader | None = FrameReader(TO_HOST)
        self._begun = bytearray()  # a frame of the guest whose end is not there yet
        self._running: dict[int, _Running] = {}
        self._heard = 0  # frames of the guest

    @property
    def gave_up(self) -> bool:
        """Whether the guest sent something that is no frame."""
        return self._answers is None

    async def pass_requests(self, data: bytes) -> bytes:
        """Return the client's frames to pass on. Raises ProtocolError."""
        parts: list[bytes] = []
        for number, (kind, stream, payload) in enumerate(self._asked.feed(data), 1):
            if number > _MAX_FRAMES:
                raise ProtocolError(f"a message of more than {_MAX_FRAMES} frames")
            if kind == DATA and not payload:
                raise ProtocolError("an empty frame")
            if number % _ASKED_IN_A_ROW == 0:
                await asyncio.sleep(0)
            if kind == OPEN and not await self._note_begin(stream, payload):
                continue
            if kind == OPEN:
                parts += request_frames(stream, payload)
            else:
                parts.append(encode(kind, stream, payload))
        return b"".join(parts)

    async def _note_begin(self, stream: int, payload: bytes) -> bool:
        """Note a request that begins. Returns whether the guest may have it."""
        request = decode_json(payload, MAX_REQUEST_ITEMS)
        kind = _PROGRAMS.get(str(request.get("op")))
        if kind is None:
            return True
        allowance = ExitStack()
        try:
            allowance.enter_context(self._executions.one(self._user_id))
        except TooMany as refusal:
            self._metrics.refusals.labels("quota").inc()
            self._journal.record_refusal("quota", user=self._user_id, sandbox_id=self._name)
            message = {"code": "quota", "message": str(refusal)}
            await self._answer(encode_json(ERROR, stream, message))
            return False
        content = request.get("source") or request.get("argv") or request.get("path")
        self._running[stream] = _Running(kind, allowance, str(content)[:_MAX_CONTENT])
        return True

    async def pass_answers(self, data: bytes) -> bytes:
        """Return the guest's frames to pass on, each whole, and note the ends of programs. Once the
        guest has sent something that is no frame, everything is passed on."""
        if self._answers is None:
            return data
        self._begun += data
        try:
            for kind, stream, payload in self._answers.feed(data):
                self._heard += 1
                if self._heard % FRAMES_IN_A_ROW == 0:
                    await asyncio.sleep(0)
                if kind in (RESULT, ERROR) and stream in self._running:
                    running = self._running.pop(stream)
                    running.context.run(self._note_end, running, kind, payload)
        except ProtocolError:
            self._answers = None  # the client sees it as well, and breaks off
        unfinished = self._answers.unfinished if self._answers is not None else 0
        end = len(self._begun) - unfinished
        whole = bytes(memoryview(self._begun)[:end])
        del self._begun[:end]
        return whole

    def _note_end(self, running: _Running, kind: int, payload: bytes) -> None:
        result: dict[str, object] = {}
        with suppress(ProtocolError):
            result = decode_json(payload, MAX_ANSWER_ITEMS)
        code = result.get("exit_code")
        if kind == RESULT and code == 0:
            cause = "ok"
        else:
            cause = "killed" if result.get("killed") else "failed"
            self._on_failure()
        self._log(running, cause, code if isinstance(code, int) else None)

    def _log(self, running: _Running, cause: str, code: int | None = None) -> None:
        running.allowance.close()
        seconds = time.monotonic() - running.started
        self._metrics.executions.labels(running.kind, cause).inc()
        self._metrics.durations.labels(running.kind).observe(seconds)
        self._journal.record_execution(
            user=self._user_id, ok=cause == "ok", content=running.content, kind=running.kind,
            cause=cause, sandbox_id=self._name, exit_code=code, seconds=round(seconds, 6),
        )  # fmt: skip

    def close(self, cause: str) -> None:
        """Log the programs that ended with the sandbox."""
        running, self._running = self._running, {}
        for one in running.values():
            one.context.run(self._log, one, cause)
        if running and cause == "sandbox_lost":
            self._journal.security_event(cause, self._name, {"programs": len(running)})


class _Running:
    """A program, and the context of the request that began it, in which its end is logged."""

    __slots__ = ("allowance", "content", "context", "kind", "started")

    def __init__(self, kind: str, allowance: ExitStack, content: str) -> None:
        self.kind = kind
        self.allowance = allowance
        self.content = content
        self.context = copy_context()
        self.started = time.monotonic()
