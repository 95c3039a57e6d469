"""The native backend keeps the contract, as root and as an ordinary user."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from checks import parameters
from native_leftovers import Leftovers

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.testing.conformance import Check, run_check, run_quick

# These are kept everywhere. Where there is a cgroup or a volume, more are added.
ALWAYS = frozenset(["root", "identity", "processes", "network", "images", "usage", "pids", "disk"])
WITH_CGROUPS = frozenset(["memory", "cpu", "pids_told"])
WITH_VOLUME = frozenset(["disk_apart"])
REMEDY = "run as root, or as a user with a delegated cgroup"

# The checks that fail here, each with the reason. One that passes by accident fails the run.
KNOWN_FAILURES: dict[str, str] = {}


@dataclass(frozen=True)
class Native:
    backend: NativeBackend
    features: frozenset[str]
    leftovers: Leftovers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def native() -> AsyncIterator[Native]:
    backend = NativeBackend()
    health = await backend.health()
    sandbox_id = new_sandbox_id()
    try:
        await backend.create(sandbox_id, SandboxConfig(), {})
    except SandboxCreationError as error:
        assert not health.available, f"health says {health.detail}, but {error}"
        pytest.skip(f"native sandboxes are not available: {health.detail} {health.remedy}")
    await backend.destroy(sandbox_id)
    assert health.available, f"a sandbox can be made, but health says: {health.detail}"
    posture = (await backend.spawner(backend.templates.get("default"))).posture
    features = ALWAYS
    features |= WITH_CGROUPS if posture["cgroup_version"] else frozenset()
    features |= WITH_VOLUME if posture["volume"] else frozenset()
    yield Native(backend, features, Leftovers(backend))
    await backend.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(native: Native, check: Check) -> None:
    if missing := check.missing(native.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; {REMEDY}")
    await run_check(check, native.backend, native.features)
    await native.leftovers.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_quick_checks_report(native: Native) -> None:
    told: dict[str, bool] = {}

    def report(name: str, ok: bool, detail: str) -> None:
        assert detail
        told[name] = ok

    assert await run_quick(native.backend, report, SandboxConfig(cpu_cores=0.5, memory_mb=256))
    assert all(told.values())
    assert {"health", "python_programs.hello", "isolation.there_is_no_network"} <= set(told)
    await native.leftovers.check()


HOARD = """
import ctypes, os, resource, socket, time
libc = ctypes.CDLL(None)
watches = 0
while libc.inotify_init1(0) >= 0:
    watches += 1
left, right = socket.socketpair()
sent = 0
try:
    while True:  # not read, so in flight
        socket.send_fds(left, [b"x"], [0] * 200, socket.MSG_DONTWAIT)
        sent += 200
except OSError:
    pass
print(watches, sent, flush=True)
time.sleep(1000)
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sandbox_leaves_its_user_what_the_kernel_has_for_one(native: Native) -> None:
    """Without root, sandboxes run as the user who starts them, so this process is that user,
    too."""
    async with Sandbox(native.backend, new_sandbox_id()) as sandbox:
        hoarding = await sandbox.start_code(HOARD, timeout=60)
        said = b""
        async for _, part in hoarding.output():  # it may come in parts
            said += part
            if said.endswith(b"\n"):
                break
        watches, sent = map(int, said.split())
        assert watches > 0 and sent > 0, "it hoards nothing: nothing is shown here"
        ours = ctypes.CDLL(None).inotify_init1(0)
        assert ours >= 0, f"it has all {watches} instances"
        os.close(ours)
        left, right = socket.socketpair()
        with left, right:
            socket.send_fds(left, [b"x"], [left.fileno()])
    await native.leftovers.check()
