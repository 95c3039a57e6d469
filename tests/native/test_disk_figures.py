"""The disk usage of a sandbox is read from the kernel's own figures, once their path is known."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))

from owners import helpers
from pressure import MIB, Scene, needs_root

pytestmark = needs_root

FILL = "open('filling', 'wb').write(bytes(20 << 20))"


async def test_the_spawner_is_not_woken_for_them():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=256)
        await sandbox.run_code(FILL)
        _, spawner = helpers()
        os.kill(spawner, signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                stats = await sandbox.get_stats()
        finally:
            os.kill(spawner, signal.SIGCONT)
        assert 19 < stats["disk_mb"] < 32


async def test_they_are_what_the_spawner_says():
    async with Scene() as scene:
        sandboxes = [await scene.sandbox(disk_mb=size) for size in (256, 512)]
        await sandboxes[1].run_code(FILL)
        for sandbox, least in zip(sandboxes, (0, 20 * MIB), strict=True):
            owned = scene.backend._owned[sandbox.sandbox_id]
            answer, _ = await owned.ask_disk(exact=True)
            assert answer["limit"] == sandbox.config.disk_mb * MIB
            assert answer["used"] >= least
            assert owned.read_disk() == (answer["used"], answer["limit"])


async def test_without_them_the_spawner_is_asked():
    """A tmpfs, for instance, has no such figures."""
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=256)
        await sandbox.run_code(FILL)
        nowhere = "/sys/fs/btrfs/gone/used"
        scene.backend._owned[sandbox.sandbox_id].figures = ([nowhere], nowhere)
        assert 19 < (await sandbox.get_stats())["disk_mb"] < 32
