"""A spawner on cgroups of version 1 can enter its own group, also in the root without a /proc."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, needs_root

from paracle_sandbox.settings import SPEED


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors(pid: int) -> list[str]:
    return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]


@needs_root
@pytest.mark.skipif(
    ":memory:" not in Path("/proc/self/cgroup").read_text(),
    reason="there are no groups of version 1 here",
)
@pytest.mark.parametrize("off", [(), SPEED], ids=["on", "off"])
async def test_it_holds_its_own_group_open(off: tuple[str, ...]) -> None:
    async with Scene(stock=0, speed_off=off) as scene:
        sandbox = await scene.sandbox()
        zygote = parent_of(scene.backend.init_pid(sandbox.sandbox_id))
        held = [path for path in descriptors(parent_of(zygote)) if path.endswith("/cgroup.procs")]
        assert len(held) == (0 if off else 1)
        assert not [path for path in descriptors(zygote) if path.endswith("/cgroup.procs")]
