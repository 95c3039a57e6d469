"""Use one manager in several event loops that follow each other."""

from __future__ import annotations

import asyncio
import gc
import warnings

from paracle_sandbox.backends.base import SandboxInfo
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.manager import SandboxManager


def use_in_several(manager: SandboxManager, config: SandboxConfig | None = None) -> None:
    """Use a manager in several loops.

    Connections belong to the loop that they were made in. Sandboxes do not: they can be removed in
    a later loop, and the manager goes on there.
    """

    async def use() -> str:
        async with manager.managed_sandbox(config) as sandbox:
            assert (await sandbox.execute("echo hi"))["stdout"] == "hi\n"
        return (await manager.create(config)).sandbox_id

    async def end() -> list[SandboxInfo]:
        await manager.close()
        left = await manager.backend.list_sandboxes()
        await manager.backend.close()
        return left

    with warnings.catch_warnings():
        # An ended loop leaves pooled connections. Only the collector closes them, with a warning.
        warnings.simplefilter("ignore", ResourceWarning)
        made = {asyncio.run(use()), asyncio.run(use())}
        assert set(manager.active_sandboxes) == made
        left = {info.sandbox_id for info in asyncio.run(end())}
        assert not manager.active_sandboxes and not left & made
        gc.collect()
