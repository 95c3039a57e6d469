"""Bytes between a remote client's WebSocket and the guest of its sandbox.

The relay outlives the WebSocket: it reads the guest all the time, as far as its outbox has
room, and a client that comes back gets what it missed. What the client asks of the guest is
read frame by frame before it is passed on: an execution counts against the user's quota and is
logged, however it ends; a frame that is none ends the relay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from contextvars import copy_context

from ..backends.base import Channel
from ..channel.frames import (
    ERROR,
    OPEN,
    RESULT,
    TO_GUEST,
    TO_HOST,
    FrameReader,
    ProtocolError,
    decode_json,
    encode_json,
)
from ..channel.resumable import (
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
from .faults import TooMany
from .journal import Journal
from .metrics import Metrics
from .quotas import Executions

SendBytes = Callable[[bytes], Awaitable[None]]
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
        await self._tell(END_MESSAGE)
        self._asked.close("removed")

    # The guest's side

    async def _read_guest(self) -> None:
        while data := await self._channel.receive():
            self._asked.answered(data)
            for start in range(0, len(data), MAX_MESSAGE):
                await self._outbox.wait_for_room()
                await self._put(data[start : start + MAX_MESSAGE])
        self._over = True
        self._asked.close("sandbox_lost")
        await self._tell(END_MESSAGE)

    async def _put(self, piece: bytes) -> None:
        async with self._sending:
            self._outbox.put(piece)
            await self._deliver(data_message(piece))

    async def _answer(self, frame: bytes) -> None:
        """An answer of our own, in the guest's place."""
        await self._put(frame)

    async def _tell(self, message: bytes) -> None:
        async with self._sending:
            await self._deliver(message)

    async def _deliver(self, message: bytes) -> None:
        if self._send is None:
            return
        try:
            async with asyncio.timeout(None) as self._patience:
                await self._send(message)
        except Exception:  # noqa: BLE001  however it broke: the client is not there any more
            self._send = None
            self.unheld_since = time.monotonic()

    # The client's side

    async def attach(self, send: SendBytes, received: int) -> int:
        """A client is there that has so many bytes already. Another one before it is let go.
        Raises OutOfStep. The answer is the number of the holder, for detach()."""
        if self._patience is not None and self._send is not None:
            # The one before may hang on a connection whose other end is long gone.
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
            return self._holder

    def detach(self, holder: int) -> None:
        if holder == self._holder:
            self._send = None
            self.unheld_since = time.monotonic()

    async def take(self, message: bytes, holder: int) -> None:
        """One message of a client. Raises OutOfStep, also when another holds the channel by now:
        what was still on the way over the broken connection is sent again over the new one."""
        kind, payload = parse(message)
        async with self._taking:
            if holder != self._holder:
                raise OutOfStep("the channel is held by another connection")
            if kind == "a":
                self._outbox.acknowledge(count_of(payload))
            elif kind == "d":
                await self._pass_on(payload)

    async def _pass_on(self, payload: bytes) -> None:
        told = self._inbox.take(len(payload))
        if told is not None:
            await self._tell(told)
        try:
            passed = await self._asked.passed(payload)
        except ProtocolError as error:
            raise OutOfStep(str(error)) from None
        if passed and not self._over:
            with suppress(OSError):
                await self._channel.send(passed)


class Watch:
    """What the client asks the guest, as far as quota and log are concerned. ``on_failure`` is
    called when a program did not succeed."""

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
        self._running: dict[int, _Running] = {}

    async def passed(self, data: bytes) -> bytes:
        """The frames to hand on. Raises ProtocolError."""
        parts: list[bytes] = []
        for kind, stream, payload in self._asked.feed(data):
            if kind == OPEN and not await self._begins(stream, payload):
                continue
            parts.append(kind.to_bytes(1, "big") + stream.to_bytes(4, "big"))
            parts.append(len(payload).to_bytes(4, "big") + payload)
        return b"".join(parts)

    async def _begins(self, stream: int, payload: bytes) -> bool:
        """Whether the guest may do it."""
        request = decode_json(payload)
        kind = _PROGRAMS.get(str(request.get("op")))
        if kind is None:
            return True
        allowance = ExitStack()
        try:
            allowance.enter_context(self._executions.one(self._user_id))
        except TooMany as refusal:
            self._metrics.refusals.labels("quota").inc()
            self._journal.refused("quota", user=self._user_id, sandbox_id=self._name)
            message = {"code": "quota", "message": str(refusal)}
            await self._answer(encode_json(ERROR, stream, message))
            return False
        content = request.get("source") or request.get("argv") or request.get("path")
        self._running[stream] = _Running(kind, allowance, str(content))
        return True

    def answered(self, data: bytes) -> None:
        """What the guest says: only the ends of programs matter, and it may lie."""
        if self._answers is None:
            return
        try:
            for kind, stream, payload in self._answers.feed(data):
                if kind in (RESULT, ERROR) and stream in self._running:
                    running = self._running.pop(stream)
                    running.context.run(self._ended, running, kind, payload)
        except ProtocolError:
            self._answers = None  # the client sees it as well, and breaks off

    def _ended(self, running: _Running, kind: int, payload: bytes) -> None:
        result: dict[str, object] = {}
        with suppress(ProtocolError):
            result = decode_json(payload)
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
        self._journal.execution(
            user=self._user_id, ok=cause == "ok", content=running.content, kind=running.kind,
            cause=cause, sandbox_id=self._name, exit_code=code, seconds=round(seconds, 6),
        )  # fmt: skip

    def close(self, cause: str) -> None:
        """Whatever still ran has ended with its sandbox."""
        running, self._running = self._running, {}
        for one in running.values():
            one.context.run(self._log, one, cause)
        if running and cause == "sandbox_lost":
            self._journal.security_event(cause, self._name, {"programs": len(running)})


class _Running:
    """A program, and the context of the request that began it: whose it is, when it ends."""

    __slots__ = ("allowance", "content", "context", "kind", "started")

    def __init__(self, kind: str, allowance: ExitStack, content: str) -> None:
        self.kind = kind
        self.allowance = allowance
        self.content = content
        self.context = copy_context()
        self.started = time.monotonic()
