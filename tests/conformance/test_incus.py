"""The Incus backend keeps the contract, on a real server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from checks import parameters
from incus_leftovers import Leftovers

import engines
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.settings import load_settings
from paracle_sandbox.testing.conformance import FEATURES, Check, run_check, run_quick

# The checks that fail here, each with the reason.
KNOWN_FAILURES: dict[str, str] = {}
IMAGE = SandboxConfig(base_image=engines.INCUS_IMAGE)


@dataclass(frozen=True)
class Containers:
    backend: IncusBackend
    features: frozenset[str]
    leftovers: Leftovers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def incus() -> AsyncIterator[Containers]:
    engines.require("incus")
    settings = load_settings(
        {
            **os.environ,
            "INCUS_SOCKET": engines.INCUS_SOCKET,
            "INCUS_SANDBOX_IMAGE": engines.INCUS_IMAGE,
        }
    )
    backend = IncusBackend(settings)
    health = await backend.health()
    assert health.available, health.detail
    features = frozenset(FEATURES)
    if await backend.homes.store.get() is None:
        features -= {"disk_apart"}
    yield Containers(backend, features, Leftovers(backend))
    await backend.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(incus: Containers, check: Check) -> None:
    if missing := check.missing(incus.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; run as root, with btrfs")
    await run_check(check, incus.backend, incus.features, IMAGE)
    await incus.leftovers.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_quick_checks_report(incus: Containers) -> None:
    told: dict[str, bool] = {}

    def report(name: str, ok: bool, detail: str) -> None:
        assert detail
        told[name] = ok

    config = SandboxConfig(cpu_cores=0.5, memory_mb=256, base_image=engines.INCUS_IMAGE)
    assert await run_quick(incus.backend, report, config)
    assert all(told.values())
    assert {"health", "python_programs.hello", "isolation.there_is_no_network"} <= set(told)
