"""The loop of an agent: request a reply, run its tool calls, send the results, until it is done.

The loop also ends when the steps or the money are used up, when the model repeats itself, or when
its programs meet the limits of the sandbox too often. All other failures of tools are results that
the model gets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..tools import Toolbox, ToolResult
from ..tools.result import make_failure
from .conversation import Message, Reply, ToolCall, Usage
from .events import AgentResult, Event, Status
from .model import Model, ModelBrokeOff, ModelError

logger = logging.getLogger(__name__)

# After this many equal rounds in a row (same calls, same results) comes a hint, and then the end.
HINT_AFTER = 3
STOP_AFTER = 6
_MAX_EMPTY = 2
# A request is sent this often if the model breaks off in the middle of its reply.
ATTEMPTS = 3
# A cautious average, for endpoints that do not count tokens.
CHARACTERS_PER_TOKEN = 3

# Explains a status whose name says little.
END_REASONS: dict[Status, str] = {
    "cost_limit": "The money is used up",
    "loop": "The model did the same thing over and over",
    "killed": "Its programs ran into the limits of the sandbox again and again",
    "error": "The model had no answer",
}

Emit = Callable[[Event], None]
# Decides on a call: True allows it, False refuses it, and a text refuses it with that reason.
Approve = Callable[[ToolCall], Awaitable[bool | str]]


class ToolRunner(Protocol):
    """Runs the tool calls of a loop."""

    async def call(self, call: ToolCall, emit: Emit) -> ToolResult:
        """Run a call. Output that comes meanwhile goes to ``emit``."""


@dataclass(frozen=True)
class Limits:
    """The limits of one task.

    ``price`` is dollars per million tokens, in and out; without it the cost is unknown.
    ``max_breaches`` programs may be stopped at a limit of the sandbox (memory, disk, processes,
    output); then the agent is stopped and its sandbox removed."""

    max_steps: int = 20
    max_cost: float | None = None
    price: tuple[float, float] | None = None
    max_breaches: int | None = 10

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError("max_steps must be at least 1")
        if self.max_cost is not None and self.price is None:
            raise ValueError("max_cost needs the price of the model: price=(3.0, 15.0)")

    def cost(self, usage: Usage) -> float | None:
        """Return the cost in dollars, or None if the price is unknown."""
        if self.price is None:
            return None
        inward, outward = self.price
        return (usage.input_tokens * inward + usage.output_tokens * outward) / 1_000_000


class Loop:
    """Works on one task from beginning to end."""

    def __init__(
        self,
        model: Model,
        system: str,
        tools: Toolbox,
        tool_runner: ToolRunner,
        limits: Limits,
        emit: Emit,
        approve: Approve | None = None,
    ) -> None:
        self._model = model
        self._system = system
        self._tools = tools
        self._tool_runner = tool_runner
        self._limits = limits
        self._emit = emit
        self._approve = approve
        self.messages: list[Message] = []
        self.usage = Usage()
        self.steps = 0
        self._last_text = ""
        self._last_round: object = None
        self._repeated = 0
        self._empty = 0
        self._breaches = 0
        self._is_estimating = False

    async def run(self, task: str) -> AgentResult:
        """Work on the task until it is done or a limit ends it."""
        self.messages.append(Message("user", task))
        while self.steps < self._limits.max_steps:
            self.steps += 1
            self._emit(Event("step", data={"number": self.steps}))
            try:
                reply = await self._request_reply()
            except ModelError as error:
                logger.warning("%s", error)
                return self.make_result("error", str(error))
            end = await self._handle_reply(reply)
            if end is not None:
                return self.make_result(end, END_REASONS.get(end))
        return self.make_result("step_limit", f"The task was not done after {self.steps} steps")

    def make_result(self, status: Status, error: str | None = None) -> AgentResult:
        """Return a result with the text, steps, usage and cost so far."""
        return AgentResult(
            status, self._last_text, self.steps, self.usage, self._limits.cost(self.usage), error
        )

    async def _request_reply(self) -> Reply:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = await self._model.reply(
                    self._system,
                    self.messages,
                    list(self._tools),
                    lambda text: self._emit(Event("text", text)),
                )
                break
            except ModelBrokeOff as error:
                if attempt == ATTEMPTS:
                    raise
                self._emit(Event("notice", f"{error}. The model is asked again."))
        self.usage += reply.usage if reply.usage != Usage() else self._estimate_usage(reply)
        self._last_text = reply.text or self._last_text
        return reply

    def _estimate_usage(self, reply: Reply) -> Usage:
        """Estimate the tokens, rather too high than too low, if the endpoint counts none."""
        if self._limits.price is not None and not self._is_estimating:
            self._is_estimating = True
            self._emit(Event("notice", "The endpoint does not count tokens; cost is estimated."))
        sent = len(self._system) + sum(
            len(m.text) + sum(len(c.arguments) for c in m.calls) for m in self.messages
        )
        received = len(reply.text) + sum(len(call.arguments) for call in reply.calls)
        return Usage(sent // CHARACTERS_PER_TOKEN + 1, received // CHARACTERS_PER_TOKEN + 1)

    async def _handle_reply(self, reply: Reply) -> Status | None:
        """Act on a reply. Returns the status if the task ends with it, otherwise None."""
        cost, most = self._limits.cost(self.usage), self._limits.max_cost
        if cost is not None and most is not None and cost > most:
            return "cost_limit"
        self.messages.append(Message("assistant", reply.text, reply.calls))
        end = await self._do_calls(reply.calls) if reply.calls else None
        if reply.cut_off and end is None:
            self.messages.append(Message("user", "You were cut off. Go on, in smaller parts."))
        if reply.cut_off or reply.calls:
            return end
        if not reply.text.strip():
            self._empty += 1
            if self._empty >= _MAX_EMPTY:
                return "error"
            self.messages[-1:] = [
                Message("user", "Your answer was empty. Call a tool, or say what you found.")
            ]
            return None
        return "done"

    async def _do_calls(self, calls: Sequence[ToolCall]) -> Status | None:
        results = []
        for call in calls:
            results.append(await self._do_call(call))
            self._breaches += results[-1].data.get("kind") == "limit"
            if self._breaches == self._limits.max_breaches:
                return "killed"
        return self._check_repetition(calls, results)

    async def _do_call(self, call: ToolCall) -> ToolResult:
        self._emit(
            Event("tool_call", data={"id": call.id, "name": call.name, "arguments": call.arguments})
        )
        allowed = True if self._approve is None else await self._approve(call)
        if allowed is True:
            result = await self._tool_runner.call(call, self._emit)
        else:
            reason = f" They say: {allowed}" if allowed else ""
            result = make_failure(
                f"The user did not allow this call.{reason} Do something else, or explain why it "
                "is needed.",
                error_type="denied",
            )
        self._emit(
            Event(
                "tool_result", result.text,
                {"id": call.id, "name": call.name, "is_error": result.is_error,
                 "failure": result.data.get("kind") or result.data.get("error_type"),
                 "images": len(result.images)},
            )
        )  # fmt: skip
        self.messages.append(
            Message("tool", result.text, call_id=call.id, is_error=result.is_error,
                    images=result.images)
        )  # fmt: skip
        return result

    def _check_repetition(
        self, calls: Sequence[ToolCall], results: Sequence[ToolResult]
    ) -> Status | None:
        """Return ``loop`` if the model has repeated itself too often. A hint comes before."""
        this = ([(c.name, c.arguments) for c in calls], [r.text for r in results])
        self._repeated = self._repeated + 1 if this == self._last_round else 1
        self._last_round = this
        if self._repeated >= STOP_AFTER:
            return "loop"
        if self._repeated == HINT_AFTER:
            self._emit(Event("notice", "The model repeats itself."))
            self.messages.append(
                Message(
                    "user",
                    f"You have done exactly this {HINT_AFTER} times, with the same answer. Try "
                    "something else, or say what you have and stop.",
                )
            )
        return None
