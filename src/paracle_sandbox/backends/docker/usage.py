"""What a container uses: from its cgroup on this machine, else one sample from the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import Usage

_CONTROLLERS = ("memory", "pids", "cpuacct")
_ROOT = "/sys/fs/cgroup"


def cgroups_of(pid: int, container: str) -> dict[str, str]:
    """The cgroup directories of a container's first process; empty when they are not here.

    That the path names the container is the proof that the process is of this machine: the pid
    that an engine elsewhere tells may be anybody's here."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if container not in path:
            continue
        if number == "0" and Path(f"{_ROOT}{path}/memory.stat").exists():
            return {"unified": f"{_ROOT}{path}"}
        for name in set(controllers.split(",")) & set(_CONTROLLERS):
            directory = Path(f"{_ROOT}/{controllers}{path}")
            found[name] = str(directory if directory.is_dir() else Path(f"{_ROOT}/{name}{path}"))
    return found if {"memory", "pids"} <= found.keys() else {}


def usage_of(sample: Mapping[str, Any]) -> Usage:
    """An engine's sample. It does not count what was killed for want of memory."""
    memory = sample.get("memory_stats") or {}
    detail = memory.get("stats") or {}
    cache = detail.get("total_inactive_file", detail.get("inactive_file", 0))
    used = max(0, int(memory.get("usage", 0)) - int(cache))
    networks = (sample.get("networks") or {}).values()
    cpu = (sample.get("cpu_stats") or {}).get("cpu_usage") or {}
    return Usage(
        cpu_seconds=int(cpu.get("total_usage", 0)) / 1e9,
        memory_bytes=used,
        memory_peak_bytes=max(used, int(memory.get("max_usage", 0))),
        processes=int((sample.get("pids_stats") or {}).get("current", 0)),
        network_rx_bytes=sum(int(one.get("rx_bytes", 0)) for one in networks),
        network_tx_bytes=sum(int(one.get("tx_bytes", 0)) for one in networks),
    )
