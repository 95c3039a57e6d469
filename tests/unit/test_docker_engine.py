"""Tests of responses that a real engine gives only now and then, or only on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from paracle_sandbox.backends.docker.engine import Engine, EngineRefused
from paracle_sandbox.backends.docker.usage import usage_of
from paracle_sandbox.backends.machine.cgroup_usage import MemoryPeak
from paracle_sandbox.settings import Settings

IMPROPER = {"message": "cannot remove it: sending SIGKILL: container state improper: stopped"}


@pytest.mark.parametrize(
    ("refusal", "times", "tries", "removed"),
    [
        ((500, IMPROPER), 1, 2, True),
        ((500, IMPROPER), 99, 5, False),
        ((500, {"message": "the disk is broken"}), 1, 1, False),
        ((404, {"message": "no such container"}), 1, 1, True),
    ],
)
async def test_a_removal_that_is_refused(
    tmp_path: Path, refusal: tuple[int, dict[str, str]], times: int, tries: int, removed: bool
) -> None:
    asked = 0

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41"})

    async def delete(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        status, answer = refusal
        if asked > times:
            return web.Response(status=204)
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", version)
    app.router.add_delete("/{path:.*}", delete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine")).start()
    engine = Engine(Settings(docker_host=f"unix://{tmp_path}/engine"))
    try:
        if removed:
            await engine.remove("some")
        else:
            with pytest.raises(EngineRefused, match=refusal[1]["message"]):
                await engine.remove("some")
        assert asked == tries
    finally:
        await engine.close()
        await runner.cleanup()


# The report of an engine about a container that had written a file of 60 MiB, read it again, and
# put 20 MiB into /dev/shm.
V1 = {
    "usage": 92786688,
    "max_usage": 93011968,
    "stats": {
        "active_file": 62947328, "cache": 83984384, "inactive_anon": 28602368,
        "inactive_file": 28672, "rss": 7639040,
        "total_active_file": 62947328, "total_cache": 83984384, "total_inactive_anon": 28602368,
        "total_inactive_file": 28672, "total_rss": 7639040,
    },
}  # fmt: skip
V2 = {
    "usage": 92786688,
    "stats": {
        "active_file": 62947328, "anon": 7639040, "file": 83947520, "inactive_anon": 28602368,
        "inactive_file": 28672, "shmem": 20971520,
    },
}  # fmt: skip


@pytest.mark.parametrize("memory", [V1, V2], ids=["v1", "v2"])
def test_page_cache_is_no_memory_of_the_sandbox(memory: dict[str, Any]) -> None:
    """Page cache counts neither after one read nor while in use. Shared memory counts."""
    usage = usage_of({"memory_stats": memory})
    assert usage.cache_bytes == 62976000
    assert usage.memory_bytes == 92786688 - 62976000 > 20 << 20
    # The engine reports the peak with the cache in it; ``MemoryPeak`` subtracts the cache.
    assert MemoryPeak().of(usage).memory_peak_bytes < 31 << 20


def test_an_engine_that_tells_no_cache() -> None:
    usage = usage_of({"memory_stats": {"usage": 92995584, "limit": 536870912}})
    assert (usage.memory_bytes, usage.cache_bytes) == (92995584, 0)
