"""What containers use now, or used last, and whether it was memory that ended them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config import SandboxConfig
from ..base import Usage
from ..cgroup_usage import cgroups_of, read_usage
from .engine import Engine, EngineRefused
from .owned import Owned
from .usage import usage_of
from .watch import Watch

_DEATH_SECONDS = 3.0


class Meter:
    """Reads the cgroup where that is of this machine, and asks the engine elsewhere."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine = engine
        self._watch = watch

    async def of(self, owned: Owned) -> Usage:
        return await self._measure(owned) or await self._last(owned)

    async def learn(self, owned: Owned) -> None:
        """What will be asked of it when it is no longer quite new: which image, which process."""
        said = await self._engine.inspect(owned.container)
        owned.image, owned.pid = str(said["Image"]), int(said["State"]["Pid"])
        owned.cgroups = cgroups_of(owned.pid, owned.container)

    async def sees_alive(self, owned: Owned) -> bool:
        """Whether it runs, by the word of the kernel where that is ours, else of the engine: what
        the engine has not told yet may be true already."""
        if self._watch.has_ended(owned.container):
            return False
        if owned.cgroups:
            return bool(cgroups_of(owned.pid, owned.container))
        return bool((await self._state(owned.container)).get("Running"))

    async def of_foreign(self, reference: str) -> Usage | None:
        """Of a container that another process made; None when it has ended."""
        return await self._measure(Owned(reference, SandboxConfig()))

    async def _measure(self, owned: Owned) -> Usage | None:
        """None when it has ended."""
        if not owned.cgroups:
            owned.pid = owned.pid or int((await self._state(owned.container)).get("Pid") or 0)
            if not owned.pid:
                return None
            owned.cgroups = cgroups_of(owned.pid, owned.container)
        try:
            if owned.cgroups:
                return read_usage(owned.cgroups, owned.pid)
            sample = await self._engine.stats(owned.container)
            # Of one that has ended, Docker gives a sample without figures, and Podman gives none.
            return usage_of(sample) if sample and sample.get("memory_stats") else None
        except (FileNotFoundError, EngineRefused):
            return None

    async def _last(self, owned: Owned) -> Usage:
        death = await self._watch.cause(owned.container, _DEATH_SECONDS)
        if not death.oom:
            return replace(owned.last, processes=0)
        kills = owned.last.oom_kills + 1
        peak = owned.config.memory_mb << 20
        return replace(owned.last, processes=0, memory_peak_bytes=peak, oom_kills=kills)

    async def _state(self, reference: str) -> dict[str, Any]:
        try:
            return dict((await self._engine.inspect(reference))["State"])
        except EngineRefused:
            return {}
