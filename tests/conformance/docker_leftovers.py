"""What the docker backend has left: containers of its session, and workspaces in its store.

What it keeps ready is not left, but has to be as much as it says."""

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
        await self._backend.stock.settled()
        containers = await self._backend.engine.containers(
            "paracle.managed=true", f"paracle.session={self._backend.session}"
        )
        names = [container["Names"][0] for container in containers]
        ready = [name for name in names if name.startswith("/paracle-ready-")]
        left = [f"container {name}" for name in names if name not in ready]
        workspaces = await self._backend.store.get()
        kept = os.listdir(workspaces.path) if workspaces is not None else ready
        if len(kept) != len(ready):
            left.append(f"workspaces {kept} for {ready}")
        return left
