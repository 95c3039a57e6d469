"""The network namespaces of ended sandboxes are let go when nobody waits, at the latest."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, needs_root, until

from paracle_sandbox.jail.networks import EndingNetworks

KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


def network_descriptors(pid: int) -> list[str]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(path))
    return [target for target in found if target.startswith("net:")]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@needs_root
async def test_none_is_left_when_it_is_quiet():
    async with Scene(stock=0) as scene:
        sandbox = await scene.sandbox()
        zygote = parent_of(scene.backend.init_pid(sandbox.sandbox_id))
        spawner = parent_of(zygote)
        for _ in range(5):
            ended = await scene.sandbox()
            network = os.readlink(f"/proc/{scene.backend.init_pid(ended.sandbox_id)}/ns/net")
            await scene.manager.destroy(ended.sandbox_id)
            # Where it comes from, and who may not have it: what is forked there would.
            assert network not in network_descriptors(zygote)
        own = os.readlink(f"/proc/{spawner}/ns/net")  # for sandboxes that share it
        await until(lambda: set(network_descriptors(spawner)) <= {own}, 10, "they are let go")


def start_process() -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


@pytest.mark.skipif(KERNEL < (6, 11), reason="older kernels hold none")
def test_a_network_outlives_its_process_until_it_is_let_go() -> None:
    networks, pid = EndingNetworks(), start_process()
    pidfd = os.pidfd_open(pid)
    before = network_descriptors(os.getpid())
    networks.hold(pidfd, "none")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert networks
    assert len(network_descriptors(os.getpid())) == len(before) + 1
    networks.hold(pidfd, "none")  # of nobody
    assert len(network_descriptors(os.getpid())) == len(before) + 1
    networks.let_go()
    assert networks
    networks.let_go(quiet=True)
    assert not networks
    assert network_descriptors(os.getpid()) == before
    os.close(pidfd)


@pytest.mark.skipif(KERNEL < (6, 11), reason="older kernels hold none")
def test_not_more_than_some_are_held() -> None:
    networks, pid = EndingNetworks(), start_process()
    pidfd = os.pidfd_open(pid)
    for _ in range(64):
        assert len(network_descriptors(os.getpid())) < 64
        networks.hold(pidfd, "none")
        networks.let_go()
    assert not networks
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pidfd)
