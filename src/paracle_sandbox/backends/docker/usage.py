"""What a container uses, out of one sample from the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import Usage


def usage_of(sample: Mapping[str, Any]) -> Usage:
    """An engine's sample. It does not count what was killed for want of memory, and that of Podman
    does not tell what of the memory is page cache."""
    memory = sample.get("memory_stats") or {}
    cache = _page_cache(memory.get("stats") or {})
    used = max(0, int(memory.get("usage", 0)) - cache)
    networks = (sample.get("networks") or {}).values()
    cpu = (sample.get("cpu_stats") or {}).get("cpu_usage") or {}
    return Usage(
        cpu_seconds=int(cpu.get("total_usage", 0)) / 1e9,
        memory_bytes=used,
        memory_peak_bytes=max(used, int(memory.get("max_usage", 0))),
        cache_bytes=cache,
        processes=int((sample.get("pids_stats") or {}).get("current", 0)),
        network_rx_bytes=sum(int(one.get("rx_bytes", 0)) for one in networks),
        network_tx_bytes=sum(int(one.get("tx_bytes", 0)) for one in networks),
    )


def _page_cache(detail: Mapping[str, Any]) -> int:
    """Of the whole group, which the names of cgroup v1 say. The sum without shared memory, which
    cannot be dropped: a sample of v1 does not tell that apart from what it calls "cache"."""
    return sum(
        max(0, int(detail.get(f"total_{name}", detail.get(name, 0))))
        for name in ("active_file", "inactive_file")
    )
