"""Separates the answers of a session from what its cells print. Both are hostile input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..channel.frames import MAX_DEPTH, is_deeper

MAX_FRAME = 32 << 20
_MAX_DIGITS = 9
# Room in an answer beside the shown value: for names, and the error that ended a cell.
_FRAME_HEAD = 256 << 10
_LARGE = 1 << 20
# An answer has a few texts, which may be long. A great number of small values would take thirty
# times its size of memory, and seconds to parse.
_MAX_TEXTS = 1000
_MAX_STRUCTURE = 64 << 10

Piece = bytes | dict[str, Any]


def compute_frame_limit(max_output: int) -> int:
    """Return how large an answer may be. JSON needs two bytes for some characters."""
    return 2 * max_output + _FRAME_HEAD


class FrameReader:
    """Splits one stream into printed bytes and the answers that follow the mark.

    Data that looks like an answer and is none counts as printed."""

    def __init__(self, mark: str, max_frame: int = MAX_FRAME) -> None:
        self._mark = b"\x1e" + mark.encode()
        self._max_frame = min(max_frame, MAX_FRAME)
        # A bytearray: if a large answer comes byte by byte, bytes would be copied each time.
        self._held = bytearray()
        self._awaited_bytes = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Take in received bytes and yield the pieces that they complete."""
        self._held += data
        while self._held and len(self._held) >= self._awaited_bytes:
            start = self._held.find(self._mark)
            if start < 0:
                if printed := self._take(len(self._held) - self._measure_partial_mark()):
                    yield printed
                return
            if start:
                yield self._take(start)
            piece = self._take_frame()
            if piece is None:
                return
            yield piece

    def completes_large(self, size: int) -> bool:
        """Whether ``size`` more bytes complete an answer that takes long to parse."""
        return _LARGE < self._awaited_bytes <= len(self._held) + size

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        return taken

    def _measure_partial_mark(self) -> int:
        """Return how many bytes at the end may be the beginning of a mark."""
        longest = min(len(self._mark) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(self._mark[:n])), 0)

    def _take_frame(self) -> Piece | None:
        """Take the answer at the beginning of the buffer, or return None if it is incomplete. An
        invalid answer is returned as printed bytes."""
        start = len(self._mark)
        end = self._held.find(b"\n", start, start + _MAX_DIGITS + 1)
        digits = self._held[start : end if end >= 0 else start + _MAX_DIGITS + 1]
        if end < 0 and len(digits) <= _MAX_DIGITS and (not digits or digits.isdigit()):
            return None
        if end < 0 or not digits.isdigit() or int(digits) > self._max_frame:
            return self._take_and_reset(start)
        self._awaited_bytes = end + 1 + int(digits)
        if len(self._held) < self._awaited_bytes:
            return None
        payload = bytes(memoryview(self._held)[end + 1 : self._awaited_bytes])
        if not _is_simple(payload):
            return self._take_and_reset(start)
        try:
            text = payload.decode("utf-8", "surrogatepass")
            frame = json.loads(text) if text else {"type": "end"}
        except (ValueError, RecursionError):
            return self._take_and_reset(start)
        if isinstance(frame, dict) and is_deeper(frame, MAX_DEPTH):
            return self._take_and_reset(start)
        self._take_and_reset(self._awaited_bytes)
        return frame if isinstance(frame, dict) else b""

    def _take_and_reset(self, size: int) -> bytes:
        self._awaited_bytes = 0
        return self._take(size)


def _is_simple(payload: bytes) -> bool:
    """Whether the payload, if it is JSON, has few texts and little beside them."""
    if len(payload) <= _MAX_STRUCTURE:
        return True
    plain = payload.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * _MAX_TEXTS:
        return False
    return sum(map(len, plain.split(b'"')[::2])) <= _MAX_STRUCTURE
