"""What the docker backend has left: containers of its session, and workspaces in its store."""

from __future__ import annotations

import asyncio
import os

from paracle_sandbox.backends.docker.backend import DockerBackend

PATIENCE_SECONDS = 20.0


class Leftovers:
    def __init__(self, backend: DockerBackend) -> None:
        self._backend = backend

    async def check(self) -> None:
        """The engine removes what has ended at its own leisure, so look until all is in order."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while left := await self._find():
            assert asyncio.get_running_loop().time() < deadline, left
            await asyncio.sleep(0.1)

    async def _find(self) -> list[str]:
        containers = await self._backend.engine.containers(
            "paracle.managed=true", f"paracle.session={self._backend.session}"
        )
        left = [f"container {container['Names'][0]}" for container in containers]
        workspaces = await self._backend.store.get()
        kept = os.listdir(workspaces.path) if workspaces is not None else []
        return [*left, *(f"workspace {name}" for name in kept)]
