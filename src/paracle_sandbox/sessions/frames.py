"""Answers of a session, told apart from what its cells print. Both are hostile input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_FRAME = 32 << 20
_MAX_DIGITS = 9

Piece = bytes | dict[str, Any]


class FrameReader:
    """Takes one stream apart: bytes that were printed, and answers behind the mark.

    What looks like an answer and is none counts as printed."""

    def __init__(self, mark: str) -> None:
        self._mark = b"\x1e" + mark.encode()
        self._held = b""

    def feed(self, data: bytes) -> Iterator[Piece]:
        self._held += data
        while self._held:
            start = self._held.find(self._mark)
            if start < 0:
                keep = self._partial_mark()
                printed = self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                if printed:
                    yield printed
                return
            if start:
                yield self._held[:start]
                self._held = self._held[start:]
            piece = self._take_frame()
            if piece is None:
                return
            yield piece

    def _partial_mark(self) -> int:
        """How many bytes at the end may be the beginning of a mark."""
        longest = min(len(self._mark) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(self._mark[:n])), 0)

    def _take_frame(self) -> Piece | None:
        """The answer at the beginning of what is held; None when it is not all there yet."""
        start = len(self._mark)
        end = self._held.find(b"\n", start, start + _MAX_DIGITS + 1)
        digits = self._held[start : end if end >= 0 else None]
        if end < 0 and len(digits) <= _MAX_DIGITS and (not digits or digits.isdigit()):
            return None
        if end < 0 or not digits.isdigit() or int(digits) > MAX_FRAME:
            return self._give_up(start)
        stop = end + 1 + int(digits)
        if len(self._held) < stop:
            return None
        payload = self._held[end + 1 : stop]
        try:
            frame = json.loads(payload) if payload else {"type": "end"}
        except (ValueError, RecursionError):
            return self._give_up(start)
        self._held = self._held[stop:]
        return frame if isinstance(frame, dict) else b""

    def _give_up(self, size: int) -> bytes:
        printed, self._held = self._held[:size], self._held[size:]
        return printed
