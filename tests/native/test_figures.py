"""The reported usage of a sandbox is that of its programs, without its creation, cache, or
machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from paracle_sandbox import Sandbox, SandboxConfig, load_settings
from paracle_sandbox.backends.base import Usage
from paracle_sandbox.backends.machine.cgroup_usage import MemoryPeak, read_cpu
from paracle_sandbox.backends.native.backend import NativeBackend

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs cgroups and a volume: run as root")


@pytest.fixture(params=[0, 2], ids=["made at once", "kept ready"])
async def backend(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[NativeBackend]:
    settings = replace(load_settings(), state_dir=str(tmp_path / "state"), stock=request.param)
    backend = NativeBackend(settings)
    yield backend
    await backend.close()


@needs_root
async def test_the_making_of_a_sandbox_is_no_cpu_of_its_programs(backend: NativeBackend) -> None:
    """The owner and another process read it."""
    async with Sandbox(backend, "before"):
        pass  # now there may be others in stock
    async with Sandbox(backend, "new") as sandbox:
        kernel = read_cpu(backend.cgroups("new"))
        ours = (await backend.usage("new")).cpu_seconds
        before = backend._owned["new"].record["cpu_before"]
        assert before > 0 and kernel >= before
        assert (await sandbox.get_stats())["cpu_percent"] <= 120 * (os.cpu_count() or 1)
        theirs = (await NativeBackend(backend.settings).usage("new")).cpu_seconds
        assert ours <= theirs <= read_cpu(backend.cgroups("new")) - before
        await sandbox.execute(["python3", "-c", "for _ in range(3_000_000): pass"])
        assert (await sandbox.get_stats())["cpu_seconds"] > theirs + 0.01


@needs_root
@pytest.mark.parametrize("backend", [0], indirect=True)
async def test_a_cache_of_files_is_no_peak_of_memory(backend: NativeBackend) -> None:
    async with Sandbox(backend, "new", SandboxConfig(memory_mb=256)) as sandbox:
        await sandbox.execute("head -c 400M /dev/zero >file")
        assert (await backend.usage("new")).memory_peak_bytes < 100 * MIB
        await sandbox.execute("rm file")
        assert (await backend.usage("new")).memory_peak_bytes < 100 * MIB
        await sandbox.execute(["python3", "-c", "bytearray(b'1') * (150 << 20)"])
        assert (await backend.usage("new")).memory_peak_bytes > 140 * MIB


@needs_root
@pytest.mark.parametrize("backend", [0], indirect=True)
async def test_nobody_counts_what_is_sent_over_the_host_s_network(backend: NativeBackend) -> None:
    async with Sandbox(backend, "shared", SandboxConfig(network_mode="host")) as sandbox:
        stats = await sandbox.get_stats()
        assert stats["network_rx_bytes"] is None and stats["network_tx_bytes"] is None
    async with Sandbox(backend, "alone") as sandbox:
        assert (await sandbox.get_stats())["network_rx_bytes"] == 0


def test_a_mark_that_did_not_rise_says_nothing_new() -> None:
    peak, seen = MemoryPeak(), []
    for used, mark, cache in ((10, 20, 5), (15, 300, 200), (20, 300, 0), (150, 300, 0)):
        usage = Usage(memory_bytes=used, memory_peak_bytes=mark, cache_bytes=cache)
        seen.append(peak.of(usage).memory_peak_bytes)
    assert seen == [15, 100, 100, 150]
