"""Hold what a command prints: a bounded copy, its text, and those who see it as it comes.

``Output`` collects both streams of one command up to a limit, and feeds its followers.
``Printed`` is one stream: bytes, and their text for a caller that asks for it. A program that
prints all it may must not cost its host that much twice, so the text is made when it is read, not
before, and takes the place of the bytes where these cannot be asked for.
``Consumers`` are the callbacks of the caller.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import mmap
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

# A follower that is this far behind stalls the command.
_FOLLOWER_BYTES = 1 << 20
_FOLLOWER_CHUNKS = 1024
# Of each stream, also when nothing else is kept: programs say at their end why they failed.
_LAST_WORDS = 1 << 16

Chunk = tuple[str, bytes]
# Larger ones are kept in parts of at least this, each of which goes back to the system at once when
# it is no more needed, and is never moved to make room for more.
_PART = 1 << 20
# As text is made of it.
_PIECE = 1 << 16
_PIECES = 256

# What a plain function returns does not matter; what an async one returns is awaited.
TextCallback = Callable[[str], object]
BytesCallback = Callable[[str, bytes], object]

_decoder = codecs.getincrementaldecoder("utf-8")


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
        """Return what was collected of a stream."""
        return self._collected[name]

    def only_text(self) -> None:
        """Keep no bytes beside their text: only the text will be asked for."""
        for printed in self._collected.values():
            printed.only_text = True

    def last_words(self, name: str) -> bytes:
        """Return the end of what was printed, whatever was collected of it."""
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
        """Wait for no follower any more: the command is being stopped."""
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


class _Mark(NamedTuple):
    """Says how far the bytes are text: the parts that are, its length, and what the decoder
    holds."""

    parts: int
    length: int
    state: tuple[bytes, int]


def _size(part: mmap.mmap) -> int:
    return 0 if part.closed else len(part)


class Printed:
    """Bytes that only become more; with ``only_text`` for a reader who takes them as text."""

    __slots__ = ("_begun", "_lock", "_parts", "_tail", "_text", "only_text")

    def __init__(self) -> None:
        self.only_text = False
        self._parts: list[mmap.mmap] = []
        self._tail = bytearray()
        self._text: str | None = None
        self._begun: tuple[str, _Mark] | None = None
        self._lock = threading.Lock()  # they are read in any thread

    def __bool__(self) -> bool:
        return bool(self._tail or self._parts)

    def add(self, chunk: bytes) -> None:
        with self._lock:
            self._tail += chunk
            if len(self._tail) >= _PART:
                part = mmap.mmap(-1, len(self._tail), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                part[:] = self._tail
                self._parts.append(part)
                self._tail = bytearray()

    def raw(self) -> bytes:
        with self._lock:
            return b"".join((*self._parts, self._tail))

    def text(self) -> str:
        """Return the text; bytes that are not UTF-8 are replaced."""
        with self._lock:
            if self._text is not None:
                return self._text
            if not self._parts:
                return self._tail.decode("utf-8", "replace")
            if not self.only_text:
                return self._decoded()
            self._text = self._decoded()
            self._parts.clear()
            self._tail = bytearray()
            return self._text

    def _decoded(self) -> str:
        """Decode all parts. Each goes when it was decoded, if it may; a caller that is interrupted
        meanwhile, or has no memory left, can go on from there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, mark = self._begun or ("", _Mark(0, 0, decoder.getstate()))
        size = max(_PIECE, sum(map(_size, self._parts)) // _PIECES)
        try:
            self._begun = None
            decoder.setstate(mark.state)
            text = text[: mark.length]
            for number in range(mark.parts, len(self._parts)):
                part = self._parts[number]
                for start in range(0, len(part), size):
                    # CPython lengthens a local str in place, once it has seen a few. They are of
                    # one size, so that each is made where the last one was and not in the way, and
                    # not too many for where it is a new str each time.
                    text += decoder.decode(part[start : start + size])
                mark = _Mark(number + 1, len(text), decoder.getstate())
                if self.only_text:
                    part.close()
            text += decoder.decode(self._tail, final=True)
            return text
        except BaseException:
            if self.only_text:
                self._begun = text, mark
            raise

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.text(),)


class Consumers:
    """Plain or async functions. Text comes in whole characters, however the bytes were cut."""

    def __init__(
        self,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        on_output_bytes: BytesCallback | None = None,
    ) -> None:
        self._text = {
            name: (callback, _decoder("replace"))
            for name, callback in (("stdout", on_stdout), ("stderr", on_stderr))
            if callback is not None
        }
        self._bytes = on_output_bytes
        self._waiting: asyncio.Future[object] | None = None
        self._given_up = False

    def __bool__(self) -> bool:
        return bool(self._text) or self._bytes is not None

    async def deliver(self, name: str, chunk: bytes) -> None:
        if self._given_up:
            return
        if self._bytes is not None:
            await self._settle(self._bytes(name, chunk))
        if name in self._text:
            callback, decoder = self._text[name]
            if text := decoder.decode(chunk):
                await self._settle(callback(text))

    async def finish(self) -> None:
        """Hand over what a last, incomplete character left behind."""
        if self._given_up:
            return
        for callback, decoder in self._text.values():
            if text := decoder.decode(b"", final=True):
                await self._settle(callback(text))

    def give_up(self) -> None:
        """Cancel an async callback that is still at work, and call none again: the command has
        been stopped, and what is left of its output may be a thousand calls more."""
        self._given_up = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _settle(self, answer: object) -> None:
        if not inspect.isawaitable(answer):
            return
        # A task of its own, so that give_up() can end it and not the one that delivers.
        self._waiting = asyncio.ensure_future(answer)
        try:
            await asyncio.wait((self._waiting,))
            if not self._waiting.cancelled():
                self._waiting.result()
        finally:
            self._waiting.cancel()
            self._waiting = None
