"""The reports of a backend: whether it works here, what it has, and what a sandbox has used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    """One isolation layer: whether it is in force, and what to do about it if not."""

    name: str
    in_force: bool
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Health:
    """Whether a backend works on this machine, as found out by using it."""

    backend: str
    available: bool
    detail: str = ""
    remedy: str = ""
    layers: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Usage:
    """The usage of a sandbox, and the kernel's own counts of limits that were reached.

    ``cpu_seconds`` count from the moment the sandbox was handed over where the backend says
    ``counts_from_handover``, and from its beginning otherwise. ``memory_bytes`` and
    ``memory_peak_bytes`` leave out the page cache, ``cache_bytes``, which the kernel gives up when
    it needs the room. The network figures are None where they are not counted separately, as with
    the host's network. ``incomplete`` says why the figures are only "at least so much": the sandbox
    made it impossible to look at all of it.
    """

    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    cache_bytes: int = 0
    processes: int = 0
    disk_bytes: int = 0
    disk_full: bool = False
    network_rx_bytes: int | None = 0
    network_tx_bytes: int | None = 0
    oom_kills: int = 0
    pids_denied: int = 0
    incomplete: str = ""


@dataclass(frozen=True)
class SandboxInfo:
    """One live sandbox of this machine, whichever process made it."""

    sandbox_id: str
    backend: str
    state: str
    owner_pid: int
    owner_alive: bool
    created_at: float
    config: Mapping[str, object] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
