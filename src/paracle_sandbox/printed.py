"""What a program printed to one of its streams: bytes, and their text for who asks for it.

A program that prints all it may must not cost its host that much twice. So the text is made when
it is read, not before, and takes the place of the bytes where nobody can ask for those.
"""

from __future__ import annotations

import codecs
import mmap
import threading
from collections.abc import Iterator

# Larger ones are kept in parts of at least this, each of which goes back to the system at once when
# it is no more needed, and is never moved to make room for more.
_PART = 1 << 20
# As text is made of it.
_PIECE = 1 << 16
_PIECES = 256


class Printed:
    """Bytes that only become more; with ``only_text`` for a reader who takes them as text."""

    __slots__ = ("_lock", "_parts", "_tail", "_text", "only_text")

    def __init__(self) -> None:
        self.only_text = False
        self._parts: list[mmap.mmap] = []
        self._tail = bytearray()
        self._text: str | None = None
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._tail or self._parts)

    def add(self, chunk: bytes) -> None:
        self._tail += chunk
        if len(self._tail) >= _PART:
            part = mmap.mmap(-1, len(self._tail), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            part[:] = self._tail
            self._parts.append(part)
            self._tail = bytearray()

    def raw(self) -> bytes:
        return b"".join((*self._parts, self._tail))

    def text(self) -> str:
        """What is not UTF-8 is replaced."""
        with self._lock:  # errors are read in any thread
            if self._text is not None:
                return self._text
            if not self._parts:
                return self._tail.decode("utf-8", "replace")
            text = self._decoded()
            if self.only_text:
                self._text = text
                self._parts.clear()
                self._tail = bytearray()
            return text

    def _decoded(self) -> str:
        text = ""
        for piece in self._decoded_pieces():
            # CPython lengthens a local str in place, once it has seen a few. They are of one size,
            # so that each is made where the last one was and not in the way, and not too many for
            # where it is a new str each time.
            text += piece
        return text

    def _decoded_pieces(self) -> Iterator[str]:
        """Each part goes when it was decoded, if it may."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        size = max(_PIECE, sum(map(len, self._parts)) // _PIECES)
        for part in self._parts:
            for start in range(0, len(part), size):
                yield decoder.decode(part[start : start + size])
            if self.only_text:
                part.close()
        yield decoder.decode(self._tail, final=True)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.text(),)
