"""AsyncDockerizedTerminal: a terminal in a container, ours or not.

In one of our sandboxes it is a Terminal. Into any other container, given by its id, its name or
an engine's handle, a guest is sent first, as a further program of it; the container needs python3
and is left as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ..backends.registry import inside_container
from ..config import SandboxConfig
from ..errors import SandboxError, SandboxExecutionError
from ..ids import new_sandbox_id
from ..results import CommandResult
from ..sandbox.sandbox import Sandbox
from ..sandbox.terminal import Terminal
from ..settings import load_settings


class AsyncDockerizedTerminal:
    """Commands that share directory and variables. ``default_timeout`` is in seconds."""

    def __init__(
        self,
        container: Any,
        working_dir: str = "/workspace",
        env_vars: Mapping[str, str] | None = None,
        default_timeout: float = 60,
    ) -> None:
        self._given = container
        self.working_dir = working_dir
        self.env_vars = dict(env_vars or {})
        self.default_timeout = default_timeout
        self._sent: Sandbox | None = None
        self._terminal: Terminal | None = None

    @property
    def container(self) -> Any:
        """Return what it was given; for one of our sandboxes the engine's handle, if there is
        one."""
        return getattr(self._given, "container", None) or self._given

    @property
    def session(self) -> Terminal | None:
        """The terminal itself; None before init() and after close()."""
        return self._terminal

    async def init(self) -> None:
        """Make it ready. A second call is a no-op."""
        if self._terminal is not None:
            return
        try:
            sandbox = await self._place()
            if self.working_dir != sandbox.config.working_dir:
                await sandbox.execute(["mkdir", "-p", "--", self.working_dir], cwd="/")
            terminal = Terminal(sandbox, self.working_dir, self.env_vars, self.default_timeout)
            await terminal.init()
        except BaseException:
            await self.close()
            raise
        self._terminal = terminal

    async def _place(self) -> Sandbox:
        if isinstance(self._given, Sandbox):
            return self._given
        backend = inside_container(_reference(self._given), load_settings())
        # The longest an execution may last; every command has its own time.
        config = SandboxConfig(timeout_seconds=3600)
        self._sent = Sandbox(backend, new_sandbox_id(), config)
        await self._sent.start()
        return self._sent

    async def run(self, command: str, timeout: float | None = None) -> CommandResult:
        """Run a command where the last one left off; exit code, stdout and stderr apart."""
        if self._terminal is None:
            raise SandboxExecutionError("Terminal not initialised")
        return await self._terminal.run(command, timeout)

    async def run_command(self, cmd: str, timeout: float | None = None) -> str:
        """Run a command; what it printed, and its stderr as well when it failed, without blanks
        and line feeds around it. run() has the exact output."""
        if self._terminal is None:
            raise SandboxExecutionError("Terminal not initialised")
        return (await self._terminal.run_command(cmd, timeout)).strip()

    async def close(self) -> None:
        """Idempotent. The container lives on."""
        terminal, self._terminal = self._terminal, None
        sent, self._sent = self._sent, None
        if terminal is not None:
            await terminal.close()
        if sent is not None:
            await sent.stop()

    async def __aenter__(self) -> Self:
        await self.init()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _reference(container: Any) -> str:
    """An id or a name, of what the Docker libraries call a container."""
    reference = container if isinstance(container, str) else getattr(container, "id", None)
    if not isinstance(reference, str) or not reference:
        raise SandboxError(f"Not a container: {container!r}")
    return reference
