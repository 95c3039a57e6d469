"""A conversation with a model, in no vendor's format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from ..tools import Image


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is the JSON text as the model wrote it, which may be broken."""

    id: str
    name: str
    arguments: str

    def as_object(self) -> dict[str, Any]:
        """The arguments as endpoints take them back: what was broken is explained in the tool's
        answer, and not every endpoint would bear to see it again."""
        try:
            value = json.loads(self.arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Usage:
    """Tokens."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )


@dataclass(frozen=True)
class Message:
    """One turn. ``calls`` are the assistant's; the rest below belongs to a tool's answer."""

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    is_error: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a model said. ``cut_off`` when it ran out of tokens in the middle."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    cut_off: bool = False
