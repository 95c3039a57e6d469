"""The Docker backend keeps the contract, on a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from checks import parameters

from containers import Containers, engine_settings, opened
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.testing.conformance import Check, run_check, run_quick

# The checks that fail here, each with the reason.
KNOWN_FAILURES: dict[str, str] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def docker() -> AsyncIterator[Containers]:
    async for containers in opened(DockerBackend(engine_settings("docker")), frozenset()):
        yield containers


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(docker: Containers, check: Check) -> None:
    if missing := check.missing(docker.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; run as root, with btrfs")
    await run_check(check, docker.backend, docker.features)
    await docker.leftovers.check()


@pytest.mark.asyncio(loop_scope="module")
async def test_quick_checks_report(docker: Containers) -> None:
    told: dict[str, bool] = {}

    def report(name: str, ok: bool, detail: str) -> None:
        assert detail
        told[name] = ok

    assert await run_quick(docker.backend, report, SandboxConfig(cpu_cores=0.5, memory_mb=256))
    assert all(told.values())
    assert {"health", "python_programs.hello", "isolation.there_is_no_network"} <= set(told)
