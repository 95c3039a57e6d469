"""What this process holds of a container it made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...config import SandboxConfig
from ..base import Usage
from ..machine.cgroup_usage import MemoryPeak
from .attach_channel import AttachChannel
from .space import Space


@dataclass
class Owned:
    """The id of the container, and what was learned of it. ``pid`` is its first process as the
    engine's machine counts; ``cgroups`` are empty elsewhere; ``cpu_before`` is what it took to make
    it; ``space`` is there where the workspace is not ours."""

    container: str
    config: SandboxConfig
    workspace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    channel: AttachChannel | None = None
    pid: int = 0
    cgroups: dict[str, str] = field(default_factory=dict)
    image: str = ""
    space: Space | None = None
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    cpu_before: float = 0.0
    last: Usage = field(default_factory=Usage)
    created_at: float = field(default_factory=time.time)

    async def hang_up(self) -> None:
        """The end of what nobody has taken: the channel is closed by whoever connected."""
        for end in (self.channel, self.space):
            if end is not None:
                await end.close()
