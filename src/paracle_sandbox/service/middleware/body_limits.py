"""Limits of request bodies, checked while a body arrives and before it is parsed.

The cost of JSON depends on what it contains, not on its size: eight megabytes of ``[0,0,0,...``
become four million objects, and a validation error for each. So each piece of a body is scanned at
the speed of memchr for the number of its strings and for the bytes outside of them. A body with
more of either than any of our requests needs is refused before an object is made of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from ..errors import TooLarge, TooMany

MAX_BODY = 8 << 20
MAX_SMALL_BODY = 256 << 10
# The routes whose bodies have code, input or files, by the last step of their address.
_LARGE = frozenset(("execute", "shell", "stream", "commands", "stdin", "file"))

MAX_STRINGS = 8192
MAX_OUTSIDE = 64 << 10  # bytes outside of strings: numbers, brackets, white space
MAX_VALUES = 4096  # values that a comma follows

REFUSED_BYTES = 32 << 20
_MINUTE = 60.0


def limit_of(scope: MutableMapping[str, Any], max_upload: int) -> int:
    """Return how many bytes the body of a request may have."""
    last = scope["path"].rpartition("/")[2]
    if is_upload(scope):
        return max_upload
    return MAX_BODY if last in _LARGE else MAX_SMALL_BODY


def is_upload(scope: MutableMapping[str, Any]) -> bool:
    """Whether the body is a file, which the route reads piece by piece."""
    return bool(scope["method"] == "PUT" and scope["path"].endswith("/raw"))


class JsonScan:
    """Counts what a JSON text contains without parsing it."""

    __slots__ = ("_escaped", "_in_string", "_outside", "_quotes", "_values")

    def __init__(self) -> None:
        self._in_string = self._escaped = False
        self._outside = self._quotes = self._values = 0

    def feed(self, piece: bytes) -> None:
        """Count the next piece. Raises TooLarge."""
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
    """Check a whole text. Raises TooLarge."""
    JsonScan().feed(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)


class RefusedBodies:
    """Counts the bytes that each key sent in this minute and that were refused: reading them costs
    time, too."""

    def __init__(self, limit: int = REFUSED_BYTES) -> None:
        self._limit = limit
        self._since = time.monotonic()
        self._bytes: Counter[str] = Counter()

    def check(self, key_id: str) -> None:
        """Raise TooMany if this key has sent too much that was refused."""
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
