"""Collects what a cell prints and shows, and how it ends."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ..channel.frames import has_more_items

# The media types that a session passes on. All others are dropped.
MEDIA_TYPES = (
    "text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png",
    "image/jpeg", "application/json",
)  # fmt: skip
# The first bytes of images.
IMAGE_HEADERS = {"image/png": b"\x89PNG\r\n", "image/jpeg": b"\xff\xd8\xff"}
MAX_SHOWN = 100
# A JSON document of more values is not shown: checking it would take too long.
MAX_JSON_ITEMS = 50_000


class CellError(TypedDict):
    """The exception that ended a cell."""

    name: str
    message: str
    traceback: str


class CellResult(TypedDict):
    """The result of a cell.

    ``shown`` has the values of display(), open figures and the last expression, in order. Each is
    a dict by media type, with images in base64. ``text`` is the last expression as text."""

    success: bool
    number: int
    stdout: str
    stderr: str
    text: str | None
    shown: list[dict[str, str]]
    error: CellError | None


@dataclass
class Cell:
    """A running cell. It collects up to ``max_output`` bytes."""

    max_output: int
    size: int = 0
    printed: dict[str, bytearray] = field(
        default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()}
    )
    shown: list[dict[str, str]] = field(default_factory=list)
    text: str | None = None
    ended: dict[str, Any] | None = None
    stderr_ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.ended is not None and self.stderr_ended

    @property
    def is_full(self) -> bool:
        return self.size > self.max_output

    def add_output(self, name: str, data: bytes) -> None:
        """Add printed bytes. Those above the limit are counted and dropped."""
        left = self.max_output - self.size
        self.size += len(data)
        if left > 0:
            self.printed[name] += data[:left]

    def handle_answer(self, name: str, frame: dict[str, Any]) -> None:
        """Take in one answer of the session. Anything else is ignored."""
        kind = frame.get("type")
        if name == "stderr":
            self.stderr_ended = self.stderr_ended or kind == "end"
        elif kind == "end":
            self.ended = frame
        elif kind in ("display", "result") and len(self.shown) < MAX_SHOWN:
            self._add_shown(kind, frame.get("data"))

    def _add_shown(self, kind: str, bundle: object) -> None:
        if (size := _count_characters(bundle)) > self.max_output - self.size:
            self.size += size  # over the limit; parsing it would take many times its size of memory
            return
        data = filter_bundle(bundle)
        self.size += sum(map(len, data.values()))
        if data:
            self.shown.append(data)
        if kind == "result":
            self.text = data.get("text/plain")

    def to_result(self) -> CellResult:
        """Return the result of the cell, or of its part that has run."""
        ended = self.ended or {}
        error = ended.get("error")
        number = ended.get("number")
        return {
            "success": error is None,
            "number": number if isinstance(number, int) else 0,
            "stdout": self.printed["stdout"].decode("utf-8", "replace"),
            "stderr": self.printed["stderr"].decode("utf-8", "replace"),
            "text": self.text,
            "shown": self.shown,
            "error": None if error is None else _to_error(error),
        }


def _count_characters(bundle: object) -> int:
    """Count the characters of the values that could be shown."""
    if not isinstance(bundle, dict):
        return 0
    return sum(len(bundle[kind]) for kind in MEDIA_TYPES if isinstance(bundle.get(kind), str))


def filter_bundle(data: object) -> dict[str, str]:
    """Return the values of a bundle that are well formed. The sandbox may send anything."""
    if not isinstance(data, dict):
        return {}
    return {
        kind: data[kind]
        for kind in MEDIA_TYPES
        if isinstance(data.get(kind), str) and _is_sound(kind, data[kind])
    }


def _is_sound(kind: str, text: str) -> bool:
    try:
        if kind in IMAGE_HEADERS:
            return base64.b64decode(text, validate=True).startswith(IMAGE_HEADERS[kind])
        if kind == "application/json":
            if has_more_items(text.encode("utf-8", "surrogatepass"), MAX_JSON_ITEMS):
                return False
            json.loads(text, parse_constant=_refuse_constant)
    except (binascii.Error, ValueError, RecursionError):
        return False
    return True


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON, though Python reads it")


def _to_error(error: object) -> CellError:
    parts = error if isinstance(error, dict) else {}
    texts = {key: part for key, part in parts.items() if isinstance(part, str)}
    return {
        "name": texts.get("name", "Error"),
        "message": texts.get("value", ""),
        "traceback": texts.get("traceback", ""),
    }
