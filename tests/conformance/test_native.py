"""The native backend keeps the contract, as root and as an ordinary user."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from native_leftovers import Leftovers

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.testing.conformance import Check, all_checks, run_check, run_quick

# Kept everywhere; what needs a cgroup or a volume is added where there is one.
ALWAYS = frozenset(["root", "identity", "processes", "network", "images", "usage", "pids", "disk"])
WITH_CGROUPS = frozenset(["memory", "cpu", "pids_told"])
WITH_VOLUME = frozenset(["disk_apart"])
REMEDY = "run as root, or as a user with a delegated cgroup"

# Name of a check: why it fails. A check that passes here by accident fails the run.
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


def _parameters() -> list[object]:
    return [
        pytest.param(
            check,
            id=check.name,
            marks=[pytest.mark.xfail(reason=KNOWN_FAILURES[check.name], strict=True)]
            if check.name in KNOWN_FAILURES
            else [],
        )
        for check in all_checks()
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", _parameters())
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
