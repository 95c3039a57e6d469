"""What this process holds of a sandbox that it made."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config import SandboxConfig
from ..base import Usage
from ..machine.cgroup_usage import MemoryPeak
from .exec_channel import ExecChannel


@dataclass
class Owned:
    instance: str
    config: SandboxConfig
    slot: str
    channel: ExecChannel | None = None
    pid: int = 0
    cgroups: dict[str, str] = field(default_factory=dict)
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    cpu_before: float = 0.0
    last: Usage = field(default_factory=Usage)
