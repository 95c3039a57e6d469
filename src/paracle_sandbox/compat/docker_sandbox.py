"""DockerSandbox: one container, held by itself, in both vocabularies that programs know.

    DockerSandbox("id", config)              start(), execute(), get_stats(), stop()
    DockerSandbox(config, volume_bindings)   create(), run_command(), read_file(), cleanup()

It is a Sandbox with a backend of its own. Made with create(), it has a terminal, and commands
follow one another in it: directory and variables stay.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, Self, Unpack

from ..backends.base import Backend
from ..backends.registry import get_backend
from ..config import SandboxConfig
from ..ids import new_sandbox_id
from ..sandbox.command_options import CommandOptions
from ..sandbox.sandbox import Sandbox
from ..settings import load_settings
from .dockerized_terminal import AsyncDockerizedTerminal
from .sandbox_settings import SandboxSettings, with_volumes

AnyConfig = SandboxConfig | SandboxSettings


class DockerSandbox(Sandbox):
    """``backend`` is docker, gvisor, or any other by name; ``runtime`` is any OCI runtime that the
    engine of the first two has."""

    def __init__(
        self,
        sandbox_id: str | AnyConfig | None = None,
        config: AnyConfig | Mapping[str, str] | None = None,
        volume_bindings: Mapping[str, str] | None = None,
        *,
        backend: Backend | str = "docker",
        runtime: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if runtime is not None and isinstance(backend, Backend):
            raise ValueError("give a runtime or a backend; a backend has its own runtime")
        if isinstance(config, Mapping):
            config, volume_bindings = None, config
        if not isinstance(sandbox_id, str | None):
            sandbox_id, config = None, sandbox_id
        settings = load_settings()
        self.volume_bindings = dict(volume_bindings or {})
        self._owns_backend = not isinstance(backend, Backend)
        made = backend if isinstance(backend, Backend) else get_backend(backend, settings, runtime)
        full = _full(config) or settings.default_config(made.name)
        super().__init__(
            made, sandbox_id or new_sandbox_id(), with_volumes(full, self.volume_bindings), labels
        )
        self.terminal: AsyncDockerizedTerminal | None = None

    @property
    def client(self) -> Any:
        """The engine's client (aiodocker.Docker), for what is not ours to do."""
        return getattr(self._backend, "client", None)

    @property
    def container(self) -> Any:
        """The engine's handle of the container; None when there is none."""
        find = getattr(self._backend, "container_of", None)
        return find(self.sandbox_id) if find is not None else None

    async def start(self) -> None:
        try:
            await super().start()
        except BaseException:
            await self._close_own_backend()
            raise

    async def create(self) -> Self:
        """start(), with a terminal for run_command()."""
        await self.start()
        if self.terminal is None:
            terminal = AsyncDockerizedTerminal(self, self.config.working_dir, self.config.env_vars)
            try:
                await terminal.init()
            except BaseException:
                await self.stop()
                raise
            self.terminal = terminal
        return self

    async def run_command(
        self,
        command: str | list[str] | tuple[str, ...] | Any,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> str:
        """Run a command and return what it prints: where the last one left off after create(), else
        by itself."""
        session = self.terminal and self.terminal.session
        if session is None or options or not isinstance(command, str):
            return await super().run_command(command, timeout, **options)
        seconds = self.config.timeout_seconds if timeout is None else timeout
        return await session.run_command(command, seconds)

    async def stop(self) -> None:
        self.terminal = None
        try:
            await super().stop()
        finally:
            await self._close_own_backend()

    async def _close_own_backend(self) -> None:
        if self._owns_backend:
            await self._backend.close()

    def _safe_resolve_path(self, path: str) -> str:
        """Return where a path is inside. Raises SandboxPathError when it leaves the sandbox's own
        directories."""
        return posixpath.join(self.config.working_dir, self.files.checked(path))


def _full(config: AnyConfig | None) -> SandboxConfig | None:
    return config.to_config() if isinstance(config, SandboxSettings) else config
