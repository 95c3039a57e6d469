"""Follows the Python of a page: its blocks, in order, each with the names of the earlier ones.

A block is a part of an asynchronous function; one that starts an event loop is a program of its
own. ``python follow.py`` reads blocks as JSON from its standard input, so that an ordinary user who
cannot read the checkout can follow a page, too.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from paracle_sandbox import SandboxConfig, SandboxExecutor, SandboxManager
from paracle_sandbox.agents import Reply, ToolCall


class Calculator:
    """A model for the pages: it asks for one calculation, and repeats what came out."""

    name = "calculator"

    async def reply(self, system: str, messages: Any, tools: Any, on_text: Any) -> Reply:
        if messages[-1].role == "tool":
            on_text(messages[-1].text)
            return Reply(messages[-1].text)
        return Reply(calls=(ToolCall("1", "python_execute", '{"code": "6 * 7"}'),))

    async def close(self) -> None:
        pass


@asynccontextmanager
async def given_names() -> AsyncIterator[dict[str, Any]]:
    """What the pages say is there."""
    async with AsyncExitStack() as stack:
        manager = await stack.enter_async_context(SandboxManager())
        config = SandboxConfig()
        yield {
            "__name__": "__page__",
            "config": config,
            "executor": await stack.enter_async_context(SandboxExecutor()),
            "manager": manager,
            "model": Calculator(),
            "sandbox": await stack.enter_async_context(manager.managed_sandbox(config)),
        }


async def follow(blocks: list[dict[str, Any]], backend: str = "") -> None:
    async with given_names() as names:
        if backend:
            assert type(names["sandbox"]._backend).__name__ == backend
        given = dict(names)
        for block in blocks:
            if "asyncio.run(" in block["text"]:
                await asyncio.to_thread(run_program, block["text"])
                continue
            await run_block(block, names)
            # A block may have closed what it made under these names: the next one has ours.
            names.update({name: given[name] for name in ("executor", "manager", "sandbox")})


async def run_block(block: dict[str, Any], names: dict[str, Any]) -> None:
    source = "\n" * (block["line"] - 1) + block["text"]
    code = compile(source, block["page"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.iscoroutine(done):
        await done


def run_program(source: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    asyncio.run(follow(json.load(sys.stdin), *sys.argv[1:]))
