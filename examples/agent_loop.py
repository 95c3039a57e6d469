"""A whole agent, with a model of our own that needs no key: it can do exactly one task."""

import asyncio
import json
from collections.abc import Callable, Sequence

from paracle_sandbox.agents import Limits, Message, Reply, SandboxAgent, ToolCall
from paracle_sandbox.tools import Tool

CODE = "print(sum(n for n in range(1000) if n % 3 == 0 or n % 5 == 0))"


class OneTrick:
    """Anything with name, reply() and close() is a model. Real ones: SandboxAgent("gpt-6-sol")."""

    name = "one-trick"

    async def reply(
        self,
        system: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        on_text: Callable[[str], None],
    ) -> Reply:
        last = messages[-1]
        if last.role == "user":
            return Reply(calls=(ToolCall("1", "python_execute", json.dumps({"code": CODE})),))
        return Reply(f"The answer is {last.text.strip()}.")

    async def close(self) -> None: ...


async def main() -> None:
    async with SandboxAgent(OneTrick(), limits=Limits(max_steps=5)) as agent:
        async for event in agent.stream("Sum the multiples of 3 or 5 below 1000."):
            if event.kind == "tool_call":
                print("it asks for", event.data["name"])
            elif event.kind == "end":
                print(event.text)
                print("status:", event.data["status"])


asyncio.run(main())
