"""The MCP server: translates between the protocol and tool calls. It imports the SDK late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..tools import ToolResult
from .client_sandboxes import Client, ClientSandboxes
from .tools import call, descriptions

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolResult

INSTRUCTIONS = (
    "Runs code in isolated sandboxes. Files stay between calls in one sandbox; python_session also "
    "keeps variables. Without a network unless the operator allowed one. Everything is removed "
    "when you disconnect."
)
ONE_CLIENT = Client(session="stdio")

WhoIs = Callable[[Any], Client]


class Calls:
    """Runs each call in a task of its own: the SDK cancels again at every await, and a program that
    is being stopped has to be stopped to the end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[ToolResult]] = set()

    async def run(self, work: Coroutine[Any, Any, ToolResult]) -> ToolResult:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def finish(self) -> None:
        """End those that still run, and wait until they have ended."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)


def build_server(sandboxes: ClientSandboxes, calls: Calls, who_is: WhoIs) -> Server[Any]:
    """Make the server. ``who_is`` returns the client of a request, which the transport knows."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    tools = [
        types.Tool(name=t["name"], description=t["description"], input_schema=t["schema"])
        for t in descriptions()
    ]

    async def on_list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def on_call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        async def progress(amount: float, message: str) -> None:
            await ctx.session.report_progress(amount, message=message)

        work = call(sandboxes, who_is(ctx), params.name, params.arguments or {}, progress)
        return _answer(await calls.run(work))

    return Server(
        "paracle-sandbox",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )


def _answer(result: ToolResult) -> CallToolResult:
    import mcp_types as types

    content: list[Any] = [types.TextContent(type="text", text=result.text)]
    content += [
        types.ImageContent(type="image", data=image.base64, mime_type=image.media_type)
        for image in result.images
    ]
    # Pictures and tables are in the content already.
    data = {key: value for key, value in result.data.items() if key != "shown"}
    return types.CallToolResult(
        content=content, structured_content=data or None, is_error=result.is_error
    )
