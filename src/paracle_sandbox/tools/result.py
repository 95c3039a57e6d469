"""What a tool answers to a model: text, pictures, and whether it went wrong."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A model has to read it: the beginning and the end say most.
MAX_TEXT = 30_000


@dataclass(frozen=True)
class Image:
    """A picture that code made."""

    data: bytes
    media_type: str = "image/png"

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()


@dataclass(frozen=True)
class ToolResult:
    """``text`` is for the model; ``data`` is the same for programs."""

    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def make_failure(text: str, **data: Any) -> ToolResult:
    return ToolResult(text, is_error=True, data=data)


def to_observation(result: ToolResult) -> dict[str, Any]:
    """The same for programs: ``observation``, ``success``, and what the data says."""
    return {**result.data, "observation": result.text, "success": not result.is_error}


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Beginning and end of a text that is too long, and how much is missing between."""
    if len(text) <= limit:
        return text
    half = limit // 2
    missing = len(text) - 2 * half
    return f"{text[:half]}\n... ({missing} characters left out) ...\n{text[-half:]}"
