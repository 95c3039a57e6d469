"""Find what the Incus backend has left: instances of its session, volumes, folders, cgroups,
mounts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import SESSION, WARM

PATIENCE_SECONDS = 30.0


class Leftovers:
    def __init__(self, backend: IncusBackend) -> None:
        self._backend = backend

    async def check(self) -> None:
        """The server removes ended instances after a while, so look until all is in order."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while left := await self.find():
            assert asyncio.get_running_loop().time() < deadline, left
            await asyncio.sleep(0.1)

    async def find(self) -> list[str]:
        everything = await self._backend.instances.all()
        ours = [one for one in everything if one["config"].get(SESSION) == self._backend.session]
        ready = [one["name"] for one in ours if one["name"].endswith(one["config"].get(WARM, "-"))]
        left = [f"instance {one['name']}" for one in ours if one["name"] not in ready]
        # Groups whose instance does not exist any more.
        names = {str(one["name"]) for one in everything}
        left += [
            f"cgroup {path}"
            for path in Path("/sys/fs/cgroup").glob("*/lxc.payload.paracle-*")
            if path.name.removeprefix("lxc.payload.") not in names
        ]
        workspaces = await self._backend.homes.store.get()
        if workspaces is not None:
            left += [f"workspace {name}" for name in os.listdir(workspaces.path)]
        return left
