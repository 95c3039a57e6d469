"""What an agent tells while it works, and what it has to say at the end."""

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
    """``step`` and its number; ``text`` as the model writes it; ``tool_call`` and
    ``tool_result`` with name and arguments; ``tool_output`` as a program prints; ``notice`` when
    something out of the ordinary happened; ``end`` with the status."""

    kind: Kind
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentResult:
    """How a task ended. ``cost`` is in dollars, when the price of the model is known."""

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
