"""The result of a tool call: text, images, and whether it failed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A model has to read the whole text, and its beginning and end say most.
MAX_TEXT = 30_000


@dataclass(frozen=True)
class Image:
    """An image that a program made or that a file holds."""

    data: bytes
    media_type: str = "image/png"

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()


@dataclass(frozen=True)
class ToolResult:
    """The result of a call. ``text`` is for the model; ``data`` says the same to programs."""

    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def make_failure(text: str, **data: Any) -> ToolResult:
    """Return the result of a call that failed."""
    return ToolResult(text, is_error=True, data=data)


def to_observation(result: ToolResult) -> dict[str, Any]:
    """Return the result as a dict for programs: ``observation``, ``success`` and the data."""
    return {**result.data, "observation": result.text, "success": not result.is_error}


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return the text, or its beginning and end if it is too long, with the size of the gap."""
    if len(text) <= limit:
        return text
    half = limit // 2
    missing = len(text) - 2 * half
    return f"{text[:half]}\n... ({missing} characters left out) ...\n{text[-half:]}"
