"""Runs the tool calls of a model, and makes the sandbox again if it was lost.

A program that fails, takes too long or meets a limit is a result for the model. A sandbox that
broke is our problem: it is logged, removed and made again with the user's files in it, and the call
is repeated once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable

from ..client import LocalSandboxClient
from ..errors import SandboxError
from ..sandbox.sandbox import Sandbox
from ..tools import Toolbox, ToolResult
from ..tools.error_messages import classify, explain_error
from ..tools.result import make_failure
from .conversation import ToolCall
from .events import Event
from .loop import Emit

logger = logging.getLogger(__name__)

SANDBOX_LOST = (
    "\n(The sandbox broke and was replaced before this. Files that you made before are gone; the "
    "files you were given are back as they were.)"
)
Furnish = Callable[[Sandbox], Awaitable[None]]


class SandboxToolRunner:
    """Runs calls in the sandbox of one client. ``furnish`` puts the user's files into a new one."""

    def __init__(
        self,
        tools: Toolbox,
        client: LocalSandboxClient | None,
        furnish: Furnish | None = None,
        attempts: int = 2,
    ) -> None:
        self._tools = tools
        self._client = client
        self._furnish = furnish
        self._attempts = attempts
        self._furnished_sandbox: Sandbox | None = None
        self._lost = False

    async def call(self, call: ToolCall, emit: Emit) -> ToolResult:
        """Run a call, and once more in a new sandbox if the first one broke."""
        lost, self._lost = self._lost, False
        for attempt in range(1, self._attempts + 1):
            try:
                sandbox = await self.prepare_sandbox()
            except SandboxError as error:
                logger.warning("No sandbox (%s): %s", classify(error), error)
                result, broken = explain_error(error), classify(error) == "container"
            else:
                result = await self._call_tool(call, emit)
                self._log(call, result)
                broken = _is_broken(result, sandbox)
            if not broken or attempt == self._attempts:
                break
            emit(Event("notice", f"The sandbox was lost and is made again: {result.text}"))
            await self._remove_sandbox()
        lost, self._lost = lost or self._lost, False
        return dataclasses.replace(result, text=result.text + SANDBOX_LOST) if lost else result

    async def _call_tool(self, call: ToolCall, emit: Emit) -> ToolResult:
        try:
            return await self._tools.call(
                call.name,
                call.arguments,
                on_output=lambda text: emit(Event("tool_output", text)),
            )
        except Exception as error:  # a tool that the user wrote may raise anything
            logger.exception("The tool %s failed", call.name)
            return make_failure(f"The tool failed: {error!r}", error_type=type(error).__name__)

    async def prepare_sandbox(self) -> Sandbox | None:
        """Return the sandbox, with the user's files in it. Raises SandboxError."""
        if self._client is None:
            return None
        sandbox = await self._client.sandbox()
        if sandbox is not self._furnished_sandbox:
            self._lost = self._lost or self._furnished_sandbox is not None
            if self._furnish is not None:
                await self._furnish(sandbox)
        self._furnished_sandbox = sandbox
        return sandbox

    async def _remove_sandbox(self) -> None:
        if self._client is None:
            return
        try:
            await self._client.cleanup()
        except SandboxError as error:
            logger.warning("The sandbox that broke was not removed: %s", error)

    def _log(self, call: ToolCall, result: ToolResult) -> None:
        if kind := result.data.get("kind"):
            logger.warning("%s failed (%s): %s", call.name, kind, result.text[:500])


def _is_broken(result: ToolResult, sandbox: Sandbox | None) -> bool:
    is_container = result.data.get("kind") == "container"
    return is_container and sandbox is not None and not sandbox.is_running
