"""What a person sees of an agent at work: its words on stdout, everything beside them on stderr."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import output

if TYPE_CHECKING:
    from ..agents.conversation import ToolCall
    from ..agents.events import AgentResult, Event
    from ..agents.project import Change

_SHOWN = 2000


class Screen:
    def __init__(self, *, stream: bool, verbose: bool) -> None:
        self._stream = stream
        self._verbose = verbose
        self._at_line_start = True

    def show(self, event: Event) -> None:
        if event.kind == "text":
            if self._stream:
                sys.stdout.write(output.printable(event.text))
                sys.stdout.flush()
                self._at_line_start = event.text.endswith("\n")
            return
        if event.kind in ("tool_output", "end"):
            return
        self._end_line()
        if event.kind == "tool_call":
            output.note(f"→ {event.data['name']} {event.data['arguments'][:_SHOWN]}")
        elif event.kind == "notice":
            output.note(f"⚠️  {event.text[:_SHOWN]}")
        elif event.kind == "tool_result" and (self._verbose or event.data["is_error"]):
            output.note(event.text[:_SHOWN])
        elif event.kind == "step" and self._verbose:
            output.note(f"Step {event.data['number']}")

    def end(self, result: AgentResult, *, answer_shown: bool) -> None:
        self._end_line()
        if self._stream is False and answer_shown is False:
            output.say(result.text)
        if not result.success:
            output.note(f"Not finished ({result.status}): {result.error or result.text[:_SHOWN]}")
        if self._verbose:
            usage = result.usage
            cost = "" if result.cost is None else f", ${result.cost:.4f}"
            output.note(
                f"{result.steps} steps, {usage.input_tokens} tokens in, "
                f"{usage.output_tokens} out{cost}"
            )

    def show_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            output.say(change.diff())

    async def approve(self, call: ToolCall) -> bool | str:
        """y allows the call; anything else does not, and is told to the model."""
        output.note(f"{call.name}\n{call.arguments[:_SHOWN]}")
        answer = await ask("Allow this call? [y/N, or a reason] ")
        if answer in ("y", "yes"):
            return True
        return False if answer in ("", "n", "no") else answer

    def _end_line(self) -> None:
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._at_line_start = True


async def ask(question: str) -> str:
    """A line from stdin; nothing at its end. Its thread is no reason to stay when we are ended."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def answered(line: str) -> None:
        if not answer.done():
            answer.set_result(line)

    def read() -> None:
        line = sys.stdin.readline()
        loop.call_soon_threadsafe(answered, line)

    sys.stderr.write(question)
    sys.stderr.flush()
    threading.Thread(target=read, daemon=True).start()
    return (await answer).strip().lower()
