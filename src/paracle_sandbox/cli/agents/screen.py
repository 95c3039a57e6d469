"""Show a person an agent at work: its words on stdout, everything else on stderr."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import output

if TYPE_CHECKING:
    from ...agents.conversation import ToolCall
    from ...agents.events import AgentResult, Event

_SHOWN = 2000
# How much of a call is shown to the person who has to allow it: a whole file, but no flood.
_SHOWN_TO_ALLOW = 100_000


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
            output.note(f"→ {event.data['name']} {_cut(event.data['arguments'])}")
        elif event.kind == "notice":
            output.note(f"⚠️  {_cut(event.text)}")
        elif event.kind == "tool_result" and (self._verbose or event.data["is_error"]):
            output.note(_cut(event.text))
        elif event.kind == "step" and self._verbose:
            output.note(f"Step {event.data['number']}")

    def end(self, result: AgentResult, *, answer_shown: bool) -> None:
        self._end_line()
        if self._stream is False and answer_shown is False:
            output.say(result.text)
        if not result.success:
            output.note(f"Not finished ({result.status}): {result.error or _cut(result.text)}")
        if self._verbose:
            usage = result.usage
            cost = "" if result.cost is None else f", ${result.cost:.4f}"
            output.note(
                f"{result.steps} steps, {usage.input_tokens} tokens in, "
                f"{usage.output_tokens} out{cost}"
            )

    def show_changes(self, diffs: Sequence[str]) -> None:
        for diff in diffs:
            output.say(diff)

    async def approve(self, call: ToolCall) -> bool | str:
        """y allows the call; anything else does not, and is told to the model."""
        output.note(f"{call.name}\n{_cut(call.arguments, _SHOWN_TO_ALLOW)}")
        answer = await ask("Allow this call? [y/N, or a reason] ")
        if answer in ("y", "yes"):
            return True
        return False if answer in ("", "n", "no") else answer

    def _end_line(self) -> None:
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._at_line_start = True


def _cut(text: str, most: int = _SHOWN) -> str:
    """Keep the beginning, and say how much is not shown."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[... {len(text) - most} more characters are not shown]"


async def ask(question: str) -> str:
    """Read a line from stdin, an empty one at its end. The thread that reads does not keep the
    process from ending."""
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
