"""What a command prints: a bounded copy, and the followers that see it as it comes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from ..printed import Printed

# A follower that is this far behind stalls the command.
_FOLLOWER_BYTES = 1 << 20
_FOLLOWER_CHUNKS = 1024
# Of each stream, also when nothing else is kept: programs say at their end why they failed.
_LAST_WORDS = 1 << 16

Chunk = tuple[str, bytes]


class Output:
    """Collects up to ``limit`` bytes of stdout and stderr together; counts the rest."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.closed = False
        self._collected = {"stdout": Printed(), "stderr": Printed()}
        self._last = {"stdout": bytearray(), "stderr": bytearray()}
        self._followers: list[_Follower] = []
        self._released = False

    @property
    def truncated(self) -> bool:
        return self.size > self.limit

    @property
    def followed(self) -> bool:
        return bool(self._followers)

    def printed(self, name: str) -> Printed:
        """What was collected of a stream."""
        return self._collected[name]

    def only_text(self) -> None:
        """Nobody will ask for the bytes."""
        for printed in self._collected.values():
            printed.only_text = True

    def last_words(self, name: str) -> bytes:
        """The end of what was printed, whatever was collected of it."""
        return bytes(self._last[name][-_LAST_WORDS:])

    def add(self, name: str, chunk: bytes) -> None:
        room = self.limit - self.size
        self.size += len(chunk)
        if room > 0:
            self._collected[name].add(chunk if len(chunk) <= room else chunk[:room])
        last = self._last[name]
        last += chunk[-_LAST_WORDS:]
        if len(last) > 2 * _LAST_WORDS:  # now and then: each time would copy all of it
            del last[:-_LAST_WORDS]
        for follower in self._followers:
            follower.offer((name, chunk))

    async def followers_ready(self) -> None:
        """Wait for followers that are far behind; not after release()."""
        while not self._released:
            slow = next((f for f in self._followers if f.is_full), None)
            if slow is None:
                return
            await slow.moved()

    def release(self) -> None:
        """Wait for nobody any more: the command is being stopped."""
        self._released = True
        for follower in self._followers:
            follower.wake()

    def close(self) -> None:
        self.closed = True
        for follower in self._followers:
            follower.wake()

    async def follow(self) -> AsyncIterator[Chunk]:
        """Everything from the beginning, as far as it was collected, then as it comes."""
        backlog = ((name, printed.raw()) for name, printed in self._collected.items() if printed)
        follower = _Follower(backlog)
        self._followers.append(follower)
        try:
            while True:
                if follower.chunks:
                    yield follower.take()
                elif self.closed:
                    return
                else:
                    await follower.moved()
        finally:
            self._followers.remove(follower)
            follower.wake()


class _Follower:
    """One reader's queue. It and the command never wait at the same time: one when it is
    empty, the other when it is full."""

    def __init__(self, backlog: Iterable[Chunk]) -> None:
        self.chunks: deque[Chunk] = deque(backlog)
        self._size = sum(len(data) for _, data in self.chunks)
        self._moved = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._size >= _FOLLOWER_BYTES or len(self.chunks) >= _FOLLOWER_CHUNKS

    def offer(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._size += len(chunk[1])
        self._moved.set()

    def take(self) -> Chunk:
        chunk = self.chunks.popleft()
        self._size -= len(chunk[1])
        self._moved.set()
        return chunk

    def wake(self) -> None:
        self._moved.set()

    async def moved(self) -> None:
        self._moved.clear()
        await self._moved.wait()
