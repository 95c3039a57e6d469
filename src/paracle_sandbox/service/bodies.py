"""Limits of request bodies, kept before anything of a body is understood.

JSON costs what it contains, not what it weighs: eight megabytes of ``[0,0,0,...`` become four
million objects, and a complaint about each. So a body is looked at while it arrives, piece by
piece, at the speed of memchr: how much of it is outside of strings, and how many strings there are.
What has more of either than any request of ours is refused before an object is made of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .errors import TooLarge, TooMany

T = TypeVar("T")

MAX_BODY = 8 << 20
MAX_SMALL_BODY = 256 << 10
# The routes whose bodies have code, input or files in them, by the last step of their address.
_LARGE = frozenset(("execute", "shell", "stream", "commands", "stdin", "file"))

MAX_STRINGS = 8192
MAX_OUTSIDE = 64 << 10  # bytes outside of strings: numbers, brackets, white space
MAX_VALUES = 4096  # values that a comma follows

# Larger ones are read by a thread of their own.
_AT_ONCE = 256 << 10
REFUSED_BYTES = 32 << 20
_MINUTE = 60.0


def limit_of(scope: MutableMapping[str, Any], max_upload: int) -> int:
    """How many bytes the body of a request may have."""
    last = scope["path"].rpartition("/")[2]
    if is_upload(scope):
        return max_upload
    return MAX_BODY if last in _LARGE else MAX_SMALL_BODY


def is_upload(scope: MutableMapping[str, Any]) -> bool:
    """Whether the body is a file, taken piece by piece."""
    return bool(scope["method"] == "PUT" and scope["path"].endswith("/raw"))


class JsonScan:
    """Counts what a JSON text contains, without reading it. Raises TooLarge."""

    __slots__ = ("_escaped", "_in_string", "_outside", "_quotes", "_values")

    def __init__(self) -> None:
        self._in_string = self._escaped = False
        self._outside = self._quotes = self._values = 0

    def feed(self, piece: bytes) -> None:
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        if b"\\" in piece:
            # A pair of backslashes is one; what is left then stands before what it escapes.
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._escaped = piece.endswith(b"\\")
        self._quotes += piece.count(b'"')
        if self._quotes > 2 * MAX_STRINGS:
            raise TooLarge(f"The JSON has more than {MAX_STRINGS} strings")
        parts = piece.split(b'"')
        for part in parts[self._in_string :: 2]:
            self._outside += len(part)
            self._values += part.count(b",")
        if len(parts) % 2 == 0:
            self._in_string = not self._in_string
        if self._outside > MAX_OUTSIDE:
            raise TooLarge(f"The JSON has more than {MAX_OUTSIDE} bytes outside of strings")
        if self._values > MAX_VALUES:
            raise TooLarge(f"The JSON has more than {MAX_VALUES} values")


def check_json(text: bytes | str) -> None:
    """For a text that is there already. Raises TooLarge."""
    JsonScan().feed(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)


class Parser:
    """Reads large JSON beside the loop, one text at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "parse")

    async def read(self, body: bytes, parse: Callable[[bytes], T]) -> T:
        if len(body) <= _AT_ONCE:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse, body)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Budget:
    """Bytes that are kept for somebody: so many for one key, so many in all."""

    def __init__(self, per_key: int, total: int) -> None:
        self._per_key = per_key
        self._limit = total
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._by_key: Counter[str] = Counter()
        self.total = 0

    def set(self, holder: Hashable, key: str, amount: int) -> bool:
        """What a holder has now, and whether that is within the limits."""
        old_key, old = self._held.pop(holder, (key, 0))
        self._by_key[old_key] -= old
        if not self._by_key[old_key]:
            del self._by_key[old_key]
        self.total += amount - old
        if amount:
            self._held[holder] = (key, amount)
            self._by_key[key] += amount
        return self._by_key[key] <= self._per_key and self.total <= self._limit

    def of(self, key: str) -> int:
        return self._by_key[key]

    def is_over(self, key: str) -> bool:
        """Whether this key has more than its share; if not, it may be all together."""
        return self._by_key[key] > self._per_key

    def largest(self, key: str | None = None) -> Hashable:
        """Who has most of a key; without one, of the key that has most."""
        if key is None:
            key = max(self._by_key, key=self._by_key.__getitem__)
        mine = (holder for holder, (of, _) in self._held.items() if of == key)
        return max(mine, key=lambda holder: self._held[holder][1])


class RefusedBodies:
    """How much each key has sent in this minute that was refused: reading it takes time too."""

    def __init__(self, limit: int = REFUSED_BYTES) -> None:
        self._limit = limit
        self._since = time.monotonic()
        self._bytes: Counter[str] = Counter()

    def check(self, key_id: str) -> None:
        """Raises TooMany."""
        if not self._bytes:
            return
        left = self._since + _MINUTE - time.monotonic()
        if left <= 0:
            self._bytes.clear()
        elif self._bytes[key_id] > self._limit:
            text = f"More than {self._limit >> 20} MiB of this key's bodies were refused; wait"
            raise TooMany(text, left)

    def add(self, key_id: str, size: int) -> None:
        if not self._bytes:
            self._since = time.monotonic()
        self._bytes[key_id] += size
