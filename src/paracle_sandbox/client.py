"""Clients: one sandbox behind a handful of methods, for tools that do not care where it runs."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from .compat.sandbox_settings import with_volumes
from .manager import AnyConfig, SandboxManager
from .sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)


@runtime_checkable
class SandboxFileOperations(Protocol):
    """Moving files between the host and a sandbox."""

    async def copy_from(self, container_path: str, local_path: str | Path) -> None: ...
    async def copy_to(self, local_path: str | Path, container_path: str) -> None: ...
    async def read_file(self, path: str) -> str: ...
    async def write_file(self, path: str, content: str | bytes) -> None: ...


class BaseSandboxClient(ABC):
    """One sandbox at a time, made on first use."""

    @abstractmethod
    async def create(
        self,
        config: AnyConfig | None = None,
        volume_bindings: Mapping[str, str] | None = None,
    ) -> None:
        """Make a new sandbox; the one before it is removed."""

    @abstractmethod
    async def run_command(self, command: str, timeout: float | None = None) -> str:
        """Run a shell command and return what it prints. Raises SandboxTimeoutError."""

    @abstractmethod
    async def copy_from(self, container_path: str, local_path: str | Path) -> None:
        """Copy a file or directory of the sandbox to the host."""

    @abstractmethod
    async def copy_to(self, local_path: str | Path, container_path: str) -> None:
        """Copy a file or directory of the host into the sandbox."""

    @abstractmethod
    async def read_file(self, path: str) -> str:
        """Return the text of a file inside."""

    @abstractmethod
    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file inside, with the directories it needs."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Remove the sandbox. Idempotent; the next use makes a new one."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cleanup()


class LocalSandboxClient(BaseSandboxClient):
    """A client of a SandboxManager in this process.

    Without a manager it makes one for each sandbox's life, and closes it in cleanup(). The
    default configuration is the manager's: the settings of the environment and of config.toml.
    ``default_env`` adds environment variables to that default, and to no other configuration.
    """

    def __init__(
        self,
        manager: SandboxManager | None = None,
        config: AnyConfig | None = None,
        *,
        default_env: Mapping[str, str] | None = None,
    ) -> None:
        self._given_manager = manager
        self._manager = manager
        self._config = config
        self._default_env = dict(default_env or {})
        self._sandbox_id: str | None = None
        # Two first uses at once share one sandbox, and either may be cancelled without the other.
        self._making: asyncio.Task[Sandbox] | None = None

    @property
    def sandbox_id(self) -> str | None:
        return self._sandbox_id

    async def create(
        self,
        config: AnyConfig | None = None,
        volume_bindings: Mapping[str, str] | None = None,
    ) -> None:
        await self._settle()
        self._config = config or self._config
        await asyncio.shield(self._begin(volume_bindings))

    async def sandbox(self) -> Sandbox:
        """Return the sandbox itself, made if there is none: for what the methods here do not
        offer."""
        return await self._sandbox()

    async def run_command(self, command: str, timeout: float | None = None) -> str:
        return await (await self._sandbox()).run_command(command, timeout)

    async def copy_from(self, container_path: str, local_path: str | Path) -> None:
        await (await self._sandbox()).copy_from(container_path, local_path)

    async def copy_to(self, local_path: str | Path, container_path: str) -> None:
        await (await self._sandbox()).copy_to(local_path, container_path)

    async def read_file(self, path: str) -> str:
        return await (await self._sandbox()).read_file(path)

    async def write_file(self, path: str, content: str | bytes) -> None:
        await (await self._sandbox()).write_file(path, content)

    async def cleanup(self) -> None:
        await self._settle()
        await self._remove()
        if self._given_manager is None and self._manager is not None:
            manager, self._manager = self._manager, None
            await manager.close()

    async def _sandbox(self) -> Sandbox:
        if self._making is None:
            sandbox = self._find()
            if sandbox is not None:
                return sandbox
        return await asyncio.shield(self._making or self._begin(None))

    def _find(self) -> Sandbox | None:
        if self._sandbox_id is None or self._manager is None:
            return None
        sandbox = self._manager.active_sandboxes.get(self._sandbox_id)
        if sandbox is None or not sandbox.is_running:
            logger.warning("Sandbox %s is gone; a new, empty one takes over", self._sandbox_id)
            return None
        return sandbox

    def _begin(self, volume_bindings: Mapping[str, str] | None) -> asyncio.Task[Sandbox]:
        self._making = asyncio.create_task(self._replace(volume_bindings))
        self._making.add_done_callback(self._made)
        return self._making

    def _made(self, making: asyncio.Task[Sandbox]) -> None:
        self._making = None
        if not making.cancelled():
            making.exception()  # seen: who asked for the sandbox has it, or was cancelled

    async def _replace(self, volume_bindings: Mapping[str, str] | None) -> Sandbox:
        await self._remove()
        if self._manager is None:
            self._manager = SandboxManager(max_concurrent=1)
        config = self._manager.resolve_config(self._config)
        if self._config is None and self._default_env:
            env_vars = {**self._default_env, **config.env_vars}
            config = config.model_copy(update={"env_vars": env_vars})
        sandbox = await self._manager.create(with_volumes(config, volume_bindings))
        self._sandbox_id = sandbox.sandbox_id
        return sandbox

    async def _settle(self) -> None:
        """Wait for a sandbox that is being made, so that it can be replaced or removed. Of several
        that wait, the first may make another."""
        while self._making is not None:
            await asyncio.wait([self._making])

    async def _remove(self) -> None:
        sandbox_id, self._sandbox_id = self._sandbox_id, None
        if sandbox_id is not None and self._manager is not None:
            await self._manager.destroy(sandbox_id)


def create_sandbox_client(
    manager: SandboxManager | None = None, config: AnyConfig | None = None
) -> LocalSandboxClient:
    """Make the client for this machine."""
    return LocalSandboxClient(manager, config)
