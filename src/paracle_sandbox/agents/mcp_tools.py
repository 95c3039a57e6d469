"""Gives an agent the tools of MCP servers.

A server runs where the user put it: on the host, or behind an address. The model decides only which
tools are called, and with which arguments. Each connection lives in a task of its own, because the
SDK has to be left in the task that entered it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypedDict

from ..errors import SandboxError
from ..tools import Image, Tool, ToolResult
from ..tools.arguments import parse_arguments
from ..tools.result import make_failure, shorten
from .model import INSTALL

MAX_NAME = 64
_CONNECT_SECONDS = 60.0
_CALL_SECONDS = 300.0


class ServerSpec(TypedDict, total=False):
    """One entry of ``mcpServers``: a command with arguments, or an address with headers."""

    type: str
    url: str
    command: str
    args: list[str]
    env: dict[str, str]
    headers: dict[str, str]


def read_servers(source: Mapping[str, ServerSpec] | str | Path | None) -> dict[str, ServerSpec]:
    """Read the servers from an mcp.json, or return those given. Raises SandboxError that names
    the file if it is invalid."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    try:
        document = json.loads(Path(source).read_text(encoding="utf-8"))
        servers: dict[str, ServerSpec] = document["mcpServers"]
        for name, spec in servers.items():
            if not ("url" in spec or "command" in spec):
                raise SandboxError(f"{source}: {name} has neither url nor command")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SandboxError(
            f"{source} cannot be read as mcp.json, {{'mcpServers': {{...}}}}: {error!r}"
        ) from error
    return servers


def make_tool_name(server: str, tool: str) -> str:
    """Return ``mcp_<server>_<tool>``, without characters that endpoints refuse."""
    return re.sub(r"_+", "_", re.sub(r"[^a-zA-Z0-9_-]", "_", f"mcp_{server}_{tool}"))[:MAX_NAME]


class McpConnection:
    """The connection to one server, from open() to close()."""

    def __init__(self, name: str, spec: ServerSpec) -> None:
        self.name = name
        self.tools: list[McpTool] = []
        self._spec = spec
        self._close = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and list the tools. Raises SandboxError when the server cannot be reached."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        try:
            await asyncio.wait_for(asyncio.shield(ready), _CONNECT_SECONDS)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._close.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            from mcp import Client

            async with AsyncExitStack() as stack:
                target = await _make_target(self._spec, stack)
                client = await stack.enter_async_context(Client(target))
                listed = (await client.list_tools()).tools
                self.tools = [McpTool(self.name, tool, client) for tool in listed]
                if not ready.done():
                    ready.set_result(None)
                await self._close.wait()
        except ImportError as error:
            problem = f"MCP servers need a package that is not installed ({error.name}): {INSTALL}"
            _report_failure(ready, problem)
        except Exception as error:  # noqa: BLE001  the transport raises groups of anything
            _report_failure(
                ready, f"The MCP server {self.name!r} cannot be used: {_find_cause(error)}"
            )


def _report_failure(ready: asyncio.Future[None], problem: str) -> None:
    if not ready.done():
        ready.set_exception(SandboxError(problem))


async def _make_target(spec: ServerSpec, stack: AsyncExitStack) -> Any:
    """Return what the SDK's client connects to. What has to be closed goes on the stack."""
    headers = spec.get("headers")
    if "command" in spec:
        from mcp import StdioServerParameters

        return StdioServerParameters(
            command=spec["command"], args=spec.get("args", []), env=spec.get("env")
        )
    if spec.get("type") == "sse":
        from mcp.client.sse import sse_client

        return sse_client(spec["url"], headers=headers)
    if not headers:
        return spec["url"]
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(_CONNECT_SECONDS, read=_CALL_SECONDS)
    http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=timeout))
    return streamable_http_client(spec["url"], http_client=http)


def _find_cause(error: BaseException) -> str:
    """Return the first real cause in nested groups of exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class McpTool(Tool):
    """One tool of a server. Its name begins with the name of the server."""

    def __init__(self, server: str, tool: Any, client: Any) -> None:
        self.name = make_tool_name(server, tool.name)
        self.description = tool.description or tool.name
        self.parameters = tool.input_schema
        self._remote_name: str = tool.name
        self._client = client

    def checked(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        # The server checks its own arguments.
        return parse_arguments(arguments)

    async def run(self, *args: Any, **arguments: Any) -> ToolResult:
        try:
            result = await self._client.call_tool(
                self._remote_name, arguments, read_timeout_seconds=_CALL_SECONDS
            )
        except Exception as error:  # noqa: BLE001  the server's fault, whatever it is
            return make_failure(f"The tool failed: {_find_cause(error)}")
        texts = [part.text for part in result.content if part.type == "text"]
        images = tuple(
            Image(base64.b64decode(part.data), part.mime_type)
            for part in result.content
            if part.type == "image"
        )
        text = shorten("\n".join(texts)) or "(no output)"
        return ToolResult(text, bool(result.is_error), images)
