"""SandboxAgent lets a model work in a sandbox of its own, and removes it at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..audit.log import AuditLog
from ..backends.base import Backend
from ..client import LocalSandboxClient
from ..errors import SandboxError
from ..manager import AnyConfig, SandboxManager
from ..results import CommandResult
from ..tools import PythonExecute, Tool, Toolbox, sandbox_tools
from .events import AgentResult, Event
from .journal import AgentJournal
from .loop import Approve, Emit, Limits, Loop
from .mcp_tools import McpConnection, ServerSpec, read_servers
from .model import Model
from .providers import Options, make_model
from .tool_runner import Furnish, SandboxToolRunner

INSTRUCTIONS = (
    "You solve the user's task with the tools you have. Code and commands run in an isolated Linux "
    "sandbox; its working directory is /workspace, and files there stay until the end. Look before "
    "you change, check your work by running it, and finish with a short account of what you did."
)


# Models change files within a second, so that Python would take a stale .pyc file for current.
AGENT_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
# The label on an agent's sandboxes; its value is the name of the agent.
AGENT_LABEL = "agent"


class SandboxAgent:
    """Runs a model in a loop, with the tools of a sandbox and of MCP servers.

    ``model`` is a Model or the name of one, with ``provider`` if the name does not imply it. The
    sandbox is made when the first tool needs it; cleanup() or ``async with`` removes it in any
    case. ``approve`` decides on each tool call. ``furnish`` puts files into a new sandbox.
    ``name`` labels the sandboxes, and names the agent in the log ``audit``.
    """

    def __init__(
        self,
        model: Model | str | None = None,
        *,
        provider: str | None = None,
        options: Options | None = None,
        instructions: str = INSTRUCTIONS,
        tools: Sequence[Tool] | None = None,
        config: AnyConfig | None = None,
        backend: Backend | str | None = None,
        client: LocalSandboxClient | None = None,
        limits: Limits | None = None,
        stateful: bool = True,
        mcp_servers: Mapping[str, ServerSpec] | str | Path | None = None,
        approve: Approve | None = None,
        furnish: Furnish | None = None,
        name: str = "agent",
        audit: AuditLog | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model if model is not None and not isinstance(model, str) else None
        self._model_name = model if isinstance(model, str) else None
        self._provider = provider
        self._options = options
        self._owns_model = self._model is None
        self.instructions = instructions
        self.limits = limits or Limits()
        self.name = name
        own = {**(labels or {}), AGENT_LABEL: name}
        self._manager = None if client else SandboxManager(1, backend=backend, labels=own)
        self.client = client or LocalSandboxClient(self._manager, config, default_env=AGENT_ENV)
        given = sandbox_tools(self.client, stateful=stateful) if tools is None else tools
        self.tools = Toolbox(given)
        in_sandbox = tools is None or any(hasattr(tool, "client") for tool in tools)
        self._tool_runner = SandboxToolRunner(
            self.tools, self.client if in_sandbox else None, furnish
        )
        self._approve = approve
        self._journal = audit and AgentJournal(audit, name, lambda: self.client.sandbox_id)
        self._servers = read_servers(mcp_servers)
        self._connections: dict[str, McpConnection] = {}
        self._running: asyncio.Task[AgentResult] | None = None
        self._is_cancel_requested = False

    @classmethod
    async def create(cls, *args: Any, **options: Any) -> Self:
        """Return an agent that has connected its MCP servers."""
        agent = cls(*args, **options)
        try:
            await agent.connect()
        except BaseException:
            await agent.cleanup()
            raise
        return agent

    @property
    def model(self) -> Model:
        """The model. Raises ModelError when it is unknown, or its key or SDK is missing."""
        if self._model is None:
            self._model = make_model(self._model_name, self._provider, self._options)
        return self._model

    # Tasks

    async def run(
        self,
        task: str,
        *,
        timeout: float | None = None,
        on_event: Emit | None = None,
    ) -> AgentResult:
        """Work on a task to its end. Failures are in the result; SandboxError is raised only when
        the task cannot begin. Cancelling it stops what runs in the sandbox."""
        if self._running is not None:
            raise SandboxError("The agent is at work on another task; make a second agent")
        emit = self._make_emitter(on_event)
        await self.connect()
        loop = Loop(
            self.model,
            self.instructions,
            self.tools,
            self._tool_runner,
            self.limits,
            emit,
            self._approve,
        )
        self._is_cancel_requested = False
        async with self._journal.writing() if self._journal else nullcontext():
            with self._journal.task(task) if self._journal else nullcontext():
                self._running = asyncio.create_task(loop.run(task))
                try:
                    result = await self._wait_for_result(self._running, timeout, loop)
                finally:
                    self._running = None
                if result.status == "killed":
                    await self.client.cleanup()
            emit(Event("end", result.text, result.as_dict()))
        return result

    def _make_emitter(self, on_event: Emit | None) -> Emit:
        """Return a function that passes an event to the journal and to ``on_event``."""
        listeners: list[Emit] = [self._journal.record_event] if self._journal else []
        listeners += [on_event] if on_event else []

        def emit(event: Event) -> None:
            for listener in listeners:
                listener(event)

        return emit

    async def _wait_for_result(
        self, running: asyncio.Task[AgentResult], timeout: float | None, loop: Loop
    ) -> AgentResult:
        try:
            done, _ = await asyncio.wait([running], timeout=timeout)
        except asyncio.CancelledError:
            await _cancel_and_wait(running)
            raise
        if not done:
            await _cancel_and_wait(running)
            return loop.make_result("timeout", f"The task was not done after {timeout:g} seconds")
        if running.cancelled() and self._is_cancel_requested:
            return loop.make_result("cancelled", "The task was cancelled")
        return running.result()

    async def stream(self, task: str, *, timeout: float | None = None) -> AsyncIterator[Event]:
        """Run a task and yield its events as they happen. Leaving early cancels the task."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        emit: Emit = queue.put_nowait
        work = asyncio.create_task(self.run(task, timeout=timeout, on_event=emit))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            work.result()
        finally:
            await _cancel_and_wait(work)

    def cancel(self) -> None:
        """End the task that runs; run() then returns with the status ``cancelled``."""
        if self._running is not None:
            self._is_cancel_requested = True
            self._running.cancel()

    async def execute_code(self, script: str | Path, timeout: float | None = None) -> CommandResult:
        """Run a script in the agent's sandbox, without the model. ``script`` is code, or a Path on
        the host, which is copied in first. Raises the errors of Sandbox.run_code."""
        sandbox = await self._tool_runner.prepare_sandbox() or await self.client.sandbox()
        seconds = PythonExecute(self.client).seconds_for(sandbox, timeout)
        if isinstance(script, str):
            return await sandbox.run_code(script, timeout=seconds)
        await sandbox.copy_to(script, script.name)
        return await sandbox.run_file(script.name, timeout=seconds)

    # MCP servers

    async def connect(self) -> None:
        """Connect the MCP servers that are not connected yet. Raises SandboxError that names the
        server that failed."""
        for name, spec in self._servers.items():
            if name not in self._connections:
                await self._connect(name, spec)

    async def connect_mcp_server(
        self,
        server_url: str,
        server_id: str = "",
        use_stdio: bool = False,
        stdio_args: Sequence[str] = (),
    ) -> None:
        """Connect one more server, by address, or by command with ``use_stdio``."""
        spec: ServerSpec = (
            {"command": server_url, "args": list(stdio_args)} if use_stdio else {"url": server_url}
        )
        await self._connect(server_id or server_url, spec)

    async def _connect(self, name: str, spec: ServerSpec) -> None:
        connection = McpConnection(name, spec)
        await connection.open()
        self._connections[name] = connection
        for tool in connection.tools:
            self.tools.add(tool)

    async def disconnect_mcp_server(self, server_id: str = "") -> None:
        """Disconnect one server, or all."""
        for name in [server_id] if server_id else list(self._connections):
            connection = self._connections.pop(name, None)
            if connection is not None:
                for tool in connection.tools:
                    self.tools.remove(tool.name)
                await connection.close()

    # The end

    async def cleanup(self) -> None:
        """Remove the sandbox and release everything. Calling it again is harmless."""
        self.cancel()
        try:
            await self.disconnect_mcp_server()
            await self.tools.close()
        finally:
            try:
                await self.client.cleanup()
            finally:
                if self._manager is not None:
                    await self._manager.close()
                if self._owns_model and self._model is not None:
                    await self._model.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cleanup()


SandboxManus = SandboxAgent


async def _cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait until what it started is stopped."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
