"""A byte stream that survives a broken connection: both sides keep what is not acknowledged.

Messages are one letter and a payload. ``d`` carries bytes, ``a`` the count of bytes received so
far, ``e`` says that the stream has ended for good. After a reconnection each side says how much
it has received, and the other sends the rest again. What is kept is bounded: above HIGH_WATER
the sender waits for acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections import deque

HIGH_WATER = 8 << 20
ACKNOWLEDGE_EVERY = 256 << 10
MAX_MESSAGE = 1 << 20


class OutOfStep(Exception):
    """The other side asks for bytes that were never sent, or are no longer kept."""


class Outbox:
    """What was sent and not yet acknowledged."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._base = 0
        self._kept = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def total(self) -> int:
        """Bytes ever put in."""
        return self._base + self._kept

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    def put(self, data: bytes) -> None:
        self._pieces.append(data)
        self._kept += len(data)
        if self._kept >= HIGH_WATER:
            self._room.clear()

    async def wait_for_room(self) -> None:
        await self._room.wait()

    def release(self) -> None:
        """Nobody will acknowledge any more: wake who waits for room."""
        self._room.set()

    def acknowledge(self, received: int) -> None:
        """The other side has this many bytes. Raises OutOfStep."""
        if not self._base <= received <= self.total:
            raise OutOfStep(f"{received} bytes received of {self._base} to {self.total}")
        while self._pieces and self._base + len(self._pieces[0]) <= received:
            piece = self._pieces.popleft()
            self._base += len(piece)
            self._kept -= len(piece)
        if self._base < received:
            head = self._pieces.popleft()
            cut = received - self._base
            self._pieces.appendleft(head[cut:])
            self._base += cut
            self._kept -= cut
        if self._kept < HIGH_WATER:
            self._room.set()

    def pending(self) -> list[bytes]:
        """Everything not acknowledged, to be sent again."""
        return list(self._pieces)


class Inbox:
    """How much has arrived, and when to say so."""

    def __init__(self) -> None:
        self.received = 0
        self._told = 0

    def take(self, size: int) -> bytes | None:
        """Count what arrived; an acknowledgement to send, now and then."""
        self.received += size
        if self.received - self._told < ACKNOWLEDGE_EVERY:
            return None
        self._told = self.received
        return acknowledgement(self.received)


def data_message(data: bytes) -> bytes:
    return b"d" + data


def acknowledgement(received: int) -> bytes:
    return b"a" + str(received).encode()


END_MESSAGE = b"e"


def parse(message: bytes) -> tuple[str, bytes]:
    """Its kind and payload. Raises OutOfStep for what is none."""
    kind = message[:1].decode("latin-1")
    if kind not in ("d", "a", "e") or len(message) > MAX_MESSAGE + 1:
        raise OutOfStep("not a message of this protocol")
    return kind, message[1:]


def count_of(payload: bytes) -> int:
    if not payload.isdigit() or len(payload) > 20:
        raise OutOfStep("not a number of bytes")
    return int(payload)
