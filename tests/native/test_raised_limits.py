"""A sandbox may get more than the one before it, whatever the stock was made for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paracle_sandbox import Sandbox, SandboxConfig, SandboxError
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings


async def stocked(backend: NativeBackend) -> None:
    """Wait until as many children are parked as may be.

    They were made for the sandbox before the next.
    """
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        slots = [one for one in backend.records.all() if one.path.stem.startswith("slot-")]
        if len(slots) > backend.settings.stock:  # and one is the sandbox's own
            return
        assert asyncio.get_running_loop().time() < deadline, slots
        await asyncio.sleep(0.02)


async def test_memory_goes_down_and_up_again(tmp_path: Path) -> None:
    settings = Settings(
        state_dir=str(tmp_path / "state"), data_dir=str(tmp_path / "data"), template_build=False
    )
    backend = NativeBackend(settings)
    health = await backend.health()
    if not health.available:
        pytest.skip(f"native sandboxes are not available: {health.detail} {health.remedy}")
    try:
        for memory_mb in (128, 128, 128, 128, 128, 1024, 256, 2048, 512):
            config = SandboxConfig(memory_mb=memory_mb, disk_mb=256)
            try:
                async with Sandbox(backend, new_sandbox_id(), config) as sandbox:
                    assert (await sandbox.execute("true"))["exit_code"] == 0
                    await stocked(backend)
            except SandboxError as error:
                pytest.fail(f"{memory_mb} MB: {error}")
    finally:
        await backend.close()
