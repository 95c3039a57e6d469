"""The argument of a check: a backend, sandboxes that are removed afterwards, a directory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ...backends.base import Backend
from ...config import SandboxConfig
from ...ids import new_sandbox_id
from ...manager import SandboxManager
from ...sandbox.sandbox import Sandbox


class Case:
    """One run of one check. close() removes everything that was made through it."""

    def __init__(
        self,
        backend: Backend,
        backend_features: frozenset[str],
        directory: Path,
        config: SandboxConfig | None = None,
    ) -> None:
        self.backend = backend
        self.backend_features = backend_features
        self.directory = directory
        self.config = config or SandboxConfig()
        self.made: list[str] = []
        self._stack = contextlib.AsyncExitStack()

    def new_id(self) -> str:
        """Return an id for a sandbox that the check makes on the backend. It is destroyed too."""
        sandbox_id = new_sandbox_id()
        self._remove_later(sandbox_id)
        return sandbox_id

    def _remove_later(self, sandbox_id: str) -> None:
        self.made.append(sandbox_id)
        self._stack.push_async_callback(self.backend.destroy, sandbox_id)

    def unstarted(self, config: SandboxConfig | None = None, **changes: Any) -> Sandbox:
        """Return a sandbox that the check starts itself."""
        return Sandbox(self.backend, self.new_id(), self._config(config, changes))

    async def sandbox(self, config: SandboxConfig | None = None, **changes: Any) -> Sandbox:
        """Return a started sandbox. ``changes`` are fields of its configuration."""
        sandbox = self.unstarted(config, **changes)
        await sandbox.start()
        self._stack.push_async_callback(sandbox.stop)
        return sandbox

    def manager(self, max_concurrent: int = 4, **options: Any) -> SandboxManager:
        """Return a manager of this backend, which is closed afterwards."""
        manager = SandboxManager(max_concurrent, backend=self.backend, **options)
        self._stack.push_async_callback(manager.close)
        return manager

    def _config(self, config: SandboxConfig | None, changes: dict[str, Any]) -> SandboxConfig:
        base = config or self.config
        return SandboxConfig(**{**base.model_dump(), **changes}) if changes else base

    async def close(self) -> None:
        await self._stack.aclose()
