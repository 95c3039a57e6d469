"""The events of an agent that works on a task, and the result at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .conversation import Usage

Kind = Literal["step", "text", "tool_call", "tool_output", "tool_result", "notice", "end"]
Status = Literal[
    "done", "step_limit", "cost_limit", "loop", "killed", "timeout", "cancelled", "error"
]


@dataclass(frozen=True)
class Event:
    """Something that happened. ``step`` has its number; ``text`` is what the model writes;
    ``tool_call`` and ``tool_result`` have name and arguments; ``tool_output`` is what a program
    prints; ``notice`` describes something unusual; ``end`` has the status."""

    kind: Kind
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentResult:
    """The result of a task. ``cost`` is in dollars, or None if the model's price is unknown."""

    status: Status
    text: str
    steps: int
    usage: Usage
    cost: float | None = None
    error: str | None = None

    @property
    def success(self) -> bool:
        return self.status == "done"

    def as_dict(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "status": self.status,
            "text": self.text,
            "steps": self.steps,
            "input_tokens": self.usage.input_tokens,
            "output_tokens": self.usage.output_tokens,
            "cost": self.cost,
            "error": self.error,
        }
