"""Each sandbox has an empty network namespace of its own, which ends with it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, needs_root


def network_descriptors(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(path))
    return [target for target in found if target.startswith("net:")]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_root
async def test_no_process_keeps_that_of_a_sandbox_that_ended():
    async with Scene(stock=0) as scene:
        sandbox = await scene.sandbox()
        zygote = parent_of(scene.backend.init_pid(sandbox.sandbox_id))
        spawner = parent_of(zygote)
        for _ in range(5):
            ended = await scene.sandbox()
            network = os.readlink(f"/proc/{scene.backend.init_pid(ended.sandbox_id)}/ns/net")
            await scene.manager.destroy(ended.sandbox_id)
            own = os.readlink(f"/proc/{spawner}/ns/net")  # for sandboxes that share it
            assert network not in (own, os.readlink(f"/proc/{zygote}/ns/net"))
            # Where it comes from, and who may not have it: what is forked there would.
            assert network not in network_descriptors(zygote)
            assert set(network_descriptors(spawner)) <= {own}
