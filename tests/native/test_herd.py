"""Many requests at once: more than the spawner's socket holds, and more sandboxes than its
stock."""

import asyncio
from pathlib import Path

import pytest

from paracle_sandbox import Sandbox, SandboxConfig
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings


@pytest.mark.timeout(120)
async def test_a_herd_is_answered_to_the_last(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"), data_dir=str(tmp_path / "data"), template_build=False
    )
    backend = NativeBackend(settings)
    try:
        places = [Sandbox(backend, new_sandbox_id(), SandboxConfig()) for _ in range(40)]
        await asyncio.gather(*(place.start() for place in places))
        # Thousands of packets come at once: some have to wait for room, and none may be lost.
        usages = [backend.usage(place.sandbox_id) for place in places for _ in range(100)]
        assert len(await asyncio.gather(*usages)) == 4000
        results = await asyncio.gather(*(place.run_code("print(6 * 7)") for place in places))
        assert {result["stdout"] for result in results} == {"42\n"}
        await asyncio.gather(*(place.stop() for place in places))
        assert await backend.list_sandboxes() == []
    finally:
        await backend.close()
