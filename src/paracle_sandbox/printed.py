"""What a program printed to one of its streams: bytes, and their text for who asks for it.

A program that prints all it may must not cost its host that much twice. So the text is made when
it is read, not before, and takes the place of the bytes where nobody can ask for those.
"""

from __future__ import annotations

import codecs
import mmap
import threading
from typing import NamedTuple

# Larger ones are kept in parts of at least this, each of which goes back to the system at once when
# it is no more needed, and is never moved to make room for more.
_PART = 1 << 20
# As text is made of it.
_PIECE = 1 << 16
_PIECES = 256


class _Mark(NamedTuple):
    """How far the bytes are text: the parts that are, its length, and what the decoder holds."""

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
        """What is not UTF-8 is replaced."""
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
        """Each part goes when it was decoded, if it may. Whoever is interrupted meanwhile, or has
        no memory left, can go on from there."""
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
