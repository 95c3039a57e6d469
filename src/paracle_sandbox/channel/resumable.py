"""Keep a byte stream alive over connections that break: resend what was not acknowledged.

How it works. Two programs use this module, the client (`backends/remote/channel`) and the service
(`service/remote/relay`). Between them run WebSockets, one after the other; the byte stream outlives
each of them. Each side has two objects for the whole life of the stream:

    Outbox   keeps a copy of each piece of data that was sent, until the other side has it
    Inbox    counts the bytes that have arrived

    client                                     service
    Outbox ── "d" + bytes ───────────────────> Inbox
           <─────────────── "a" + count ──────           every 256 KiB
    Inbox  <─────────────── "d" + bytes ────── Outbox
           ── "a" + count ───────────────────>

1. A sender puts data into its Outbox first and sends it then. Data that was put in while there is
   no connection is sent by the next one.
2. A receiver acknowledges the total number of bytes that it has received, and the sender drops its
   copy of those.
3. When a connection breaks, nothing is lost. The client connects again. First each side says how
   many bytes it has received (the client in the address, the service in its first message); then
   each sends again all that its Outbox still holds (`pending`), and only then new data. The stream
   goes on at the byte where it stopped.
4. A sender waits (`wait_for_room`) while its Outbox holds HIGH_WATER bytes or more. This bounds the
   memory, and it is the only place where a sender waits for the other side.
5. ``e`` ends the stream for good: no connection follows it, and waiting senders are released.

Messages are one letter and a payload. ``d`` carries bytes, ``a`` the decimal count of bytes
received so far, and ``e`` says that the stream has ended. Either side may be hostile: a message
that does not fit raises OutOfStep, and the caller drops the stream.
"""

from __future__ import annotations

import asyncio
from collections import deque

HIGH_WATER = 8 << 20
ACKNOWLEDGE_EVERY = 256 << 10
MAX_MESSAGE = 1 << 20


class OutOfStep(Exception):
    """The other side broke the protocol: for instance it acknowledged bytes that were not sent."""


class Outbox:
    """The data that was sent and is not yet acknowledged."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._base = 0
        self._kept = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def total(self) -> int:
        """The number of bytes that were put in since the stream began."""
        return self._base + self._kept

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    def put(self, data: bytes) -> None:
        """Keep a copy of data that is about to be sent."""
        self._pieces.append(data)
        self._kept += len(data)
        if self._kept >= HIGH_WATER:
            self._room.clear()

    async def wait_for_room(self) -> None:
        """Wait until less than HIGH_WATER bytes are kept, or until `release`."""
        await self._room.wait()

    def release(self) -> None:
        """Wake the tasks that wait for room, because no acknowledgement will come any more."""
        self._room.set()

    def acknowledge(self, received: int) -> None:
        """Drop what the other side has: the first ``received`` bytes of the stream.

        Raises OutOfStep if that is more than was sent, or less than was acknowledged before.
        """
        if not self._base <= received <= self.total:
            raise OutOfStep(
                f"The other side acknowledges {received} bytes; "
                f"only {self._base} to {self.total} are possible"
            )
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
        """Return everything that is not acknowledged, to be sent again."""
        return list(self._pieces)


class Inbox:
    """The count of bytes that have arrived; it decides when to acknowledge them."""

    def __init__(self) -> None:
        self.received = 0
        self._acknowledged = 0

    def take(self, size: int) -> bytes | None:
        """Count ``size`` bytes. Returns an acknowledgement to send when one is due, else None."""
        self.received += size
        if self.received - self._acknowledged < ACKNOWLEDGE_EVERY:
            return None
        self._acknowledged = self.received
        return acknowledgement(self.received)


def data_message(data: bytes) -> bytes:
    """Encode a message that carries data."""
    return b"d" + data


def acknowledgement(received: int) -> bytes:
    """Encode the message that says how many bytes have been received in all."""
    return b"a" + str(received).encode()


END_MESSAGE = b"e"


def parse(message: bytes) -> tuple[str, bytes]:
    """Split a message into its kind and its payload. Raises OutOfStep if it is malformed."""
    kind = message[:1].decode("latin-1")
    if kind not in ("d", "a", "e") or len(message) > MAX_MESSAGE + 1:
        raise OutOfStep("not a message of this protocol")
    return kind, message[1:]


def count_of(payload: bytes) -> int:
    """Decode the count in the payload of an acknowledgement. Raises OutOfStep."""
    if not payload.isdigit() or len(payload) > 20:
        raise OutOfStep("not a number of bytes")
    return int(payload)
