"""The messages of a conversation with a model, independent of any vendor's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from ..tools import Image


@dataclass(frozen=True)
class ToolCall:
    """A call that a model makes. ``arguments`` is JSON text as it wrote it, which may be broken."""

    id: str
    name: str
    arguments: str

    def as_object(self) -> dict[str, Any]:
        """Return the arguments as an object, which is empty if they are broken. Endpoints refuse
        broken arguments in the history; the tool's result says what was wrong with them."""
        try:
            value = json.loads(self.arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Usage:
    """The number of tokens that were used."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )


@dataclass(frozen=True)
class Message:
    """One turn. Only the assistant has ``calls``; the fields below are of a tool's result."""

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    is_error: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Reply:
    """One reply of a model. ``cut_off`` says that it ended because the tokens ran out."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    cut_off: bool = False
