"""The tools that the server offers, and one call of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..client import LocalSandboxClient
from ..errors import SandboxError
from ..tools import ToolResult
from ..tools.arguments import ArgumentFault, to_regular_arguments
from ..tools.error_messages import explain_error
from ..tools.result import make_failure
from ..tools.tool import Tool
from .client_sandboxes import Client, ClientSandboxes, sandbox_toolset

SANDBOX = {
    "type": "string",
    "description": "Which of your sandboxes to use; your main one if left out.",
}
_LINE = 200
_PAUSE_SECONDS = 0.1
Progress = Callable[[float, str], Awaitable[None]]


def descriptions() -> list[dict[str, Any]]:
    """Return name, description and schema of every tool."""
    tools = [_with_sandbox(tool) for tool in sandbox_toolset(LocalSandboxClient())]
    return [*tools, *_OWN]


def _with_sandbox(tool: Tool) -> dict[str, Any]:
    schema = dict(tool.parameters)
    schema["properties"] = {**schema["properties"], "sandbox": SANDBOX}
    return {"name": tool.name, "description": tool.description, "schema": schema}


def _own(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    shown = {key: {"type": "string", "description": text} for key, text in properties.items()}
    schema = {"type": "object", "properties": shown, "required": [], "additionalProperties": False}
    return {"name": name, "description": description, "schema": schema}


_OWN = [
    _own("list_sandboxes", "List your sandboxes. They end when you disconnect."),
    _own(
        "create_sandbox",
        "Make a further sandbox, apart from the others. The answer has the name to use it by.",
        name="What to call it, if that matters.",
    ),
    _own(
        "destroy_sandbox",
        "Remove one of your sandboxes with everything in it.",
        sandbox="Its name; your main one if left out.",
    ),
]
_OWN_SCHEMAS = {tool["name"]: tool["schema"] for tool in _OWN}


async def call(
    sandboxes: ClientSandboxes,
    client: Client,
    name: str,
    arguments: Mapping[str, Any],
    progress: Progress,
) -> ToolResult:
    """Run one tool call. Never raises SandboxError."""
    try:
        _check_names(arguments)
        if name in _OWN_SCHEMAS:
            return await _own_call(
                sandboxes, client, name, to_regular_arguments(arguments, _OWN_SCHEMAS[name], {})
            )
        rest = {key: value for key, value in arguments.items() if key != "sandbox"}
        async with sandboxes.using(client, arguments.get("sandbox")) as sandbox:
            return await sandbox.tools.call(name, rest, on_output=_Reporter(progress))
    except ArgumentFault as fault:
        return make_failure(str(fault), error_type="arguments")
    except SandboxError as error:
        return explain_error(error)


async def _own_call(
    sandboxes: ClientSandboxes, client: Client, name: str, arguments: Mapping[str, Any]
) -> ToolResult:
    if name == "list_sandboxes":
        return _listing(sandboxes.names(client))
    if name == "create_sandbox":
        made = await sandboxes.create(client, arguments.get("name"))
        return ToolResult(f"Made the sandbox {made}.", data={"sandbox": made})
    return await _destroy(sandboxes, client, arguments.get("sandbox") or "main")


def _check_names(arguments: Mapping[str, Any]) -> None:
    for key in ("sandbox", "name"):
        if not isinstance(arguments.get(key, ""), str | None):
            raise ArgumentFault(f"{key} must be text.")


def _listing(names: Mapping[str, str | None]) -> ToolResult:
    lines = [f"{name}: {sandbox_id or 'not used yet'}" for name, sandbox_id in names.items()]
    text = "\n".join(lines) or "You have no sandbox yet; the first use makes one."
    return ToolResult(text, data={"sandboxes": dict(names)})


async def _destroy(sandboxes: ClientSandboxes, client: Client, name: str) -> ToolResult:
    if await sandboxes.destroy(client, name):
        return ToolResult(f"Removed the sandbox {name} with everything in it.")
    return make_failure(f"There is no sandbox {name!r}.", error_type="arguments")


class _Reporter:
    """Reports the progress of a program: its last whole line of output, and not too often."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._printed = 0
        self._next = 0.0
        self._line = ""

    async def __call__(self, text: str) -> None:
        self._printed += len(text)
        lines = (self._line + text).split("\n")
        self._line = lines.pop()[-_LINE:]
        now = asyncio.get_running_loop().time()
        if lines and now >= self._next:
            self._next = now + _PAUSE_SECONDS
            await self._progress(self._printed, lines[-1][-_LINE:])
