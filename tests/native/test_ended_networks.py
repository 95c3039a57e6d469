"""The network namespaces of ended sandboxes are let go when nobody waits, at the latest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, needs_root, until

from paracle_sandbox.jail.networks import EndedNetworks

AT_ONCE = 70  # more than are held


def network_descriptors(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(path))
        except FileNotFoundError:
            continue
    return {target for target in found if target.startswith("net:")}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_root
async def test_none_is_left_when_it_is_quiet():
    async with Scene(stock=0) as scene:
        sandbox = await scene.sandbox()
        mold = parent_of(scene.backend.init_pid(sandbox.sandbox_id))
        spawner = parent_of(mold)
        for _ in range(5):
            ended = await scene.sandbox()
            network = os.readlink(f"/proc/{scene.backend.init_pid(ended.sandbox_id)}/ns/net")
            await scene.manager.destroy(ended.sandbox_id)
            # Where it comes from, and who may not have it: what is forked there would.
            assert network not in network_descriptors(mold)
        own = {os.readlink(f"/proc/{scene.backend.init_pid(sandbox.sandbox_id)}/ns/net")}
        await until(lambda: network_descriptors(spawner) <= own, 10, "they are let go")


def test_not_more_than_some_are_held() -> None:
    networks = EndedNetworks()
    pipes = [os.pipe() for _ in range(AT_ONCE)]
    for read_end, _ in pipes:
        networks.take(read_end)
    held = [read_end for read_end, _ in pipes if is_open(read_end)]
    assert len(held) == AT_ONCE - 64
    assert networks
    networks.let_go()
    assert not any(is_open(read_end) for read_end in held)
    assert not networks
    for _, write_end in pipes:
        os.close(write_end)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
