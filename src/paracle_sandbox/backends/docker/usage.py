"""What a container uses, out of one sample from the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base import Usage


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
