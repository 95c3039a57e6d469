"""What containers use now, or used last, and whether it was memory that ended them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from ...config import SandboxConfig
from ..base import Usage
from ..machine.cgroup_usage import cgroups_of, read_cpu, read_usage
from .engine import Engine, EngineRefused
from .events import Watch
from .owned import Owned
from .usage import usage_of

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

    async def hand_over(self, owned: Owned) -> None:
        """Count from here: what it took to make it, and to keep it ready, is nothing of its
        programs."""
        # One that has ended: its user will hear of it.
        with contextlib.suppress(FileNotFoundError, EngineRefused):
            if not owned.image:
                await self.learn(owned)
            owned.cpu_before = await self._cpu(owned)

    async def _cpu(self, owned: Owned) -> float:
        if owned.cgroups:
            return read_cpu(owned.cgroups)
        return usage_of(await self._engine.stats(owned.container) or {}).cpu_seconds

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
        return await self._measure(Owned(reference, SandboxConfig(network_mode="bridge")))

    async def _measure(self, owned: Owned) -> Usage | None:
        """None when it has ended."""
        if not owned.cgroups:
            owned.pid = owned.pid or int((await self._state(owned.container)).get("Pid") or 0)
            if not owned.pid:
                return None
            owned.cgroups = cgroups_of(owned.pid, owned.container)
        try:
            if owned.cgroups:
                mode = owned.config.network_mode
                usage = read_usage(owned.cgroups, owned.pid, network_mode=mode)
                return owned.peak.of(_without_making(usage, owned))
            sample = await self._engine.stats(owned.container)
            # Of one that has ended, Docker gives a sample without figures, and Podman gives none.
            if not sample or not sample.get("memory_stats"):
                return None
            usage = owned.peak.of(_without_making(usage_of(sample), owned))
            if owned.config.network_mode == "host":
                usage = replace(usage, network_rx_bytes=None, network_tx_bytes=None)
            return usage
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


def _without_making(usage: Usage, owned: Owned) -> Usage:
    return replace(usage, cpu_seconds=max(0.0, usage.cpu_seconds - owned.cpu_before))
