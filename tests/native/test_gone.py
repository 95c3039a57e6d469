"""When a sandbox is reported as removed, not even a dead process of it is left."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, needs_root

pytestmark = needs_root


async def test_no_dead_process_is_left_when_stop_returns():
    async with Scene() as scene:
        for _ in range(20):
            sandbox = await scene.sandbox()
            await sandbox.run_code("print(1)")
            processes = scene.witness.processes(sandbox)
            assert processes
            await scene.manager.destroy(sandbox.sandbox_id)
            assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
