"""The Docker backend keeps the contract on Podman, too, on a real service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from checks import parameters

from containers import Containers, engine_settings, opened
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.testing.conformance import Check, run_check

# The checks that fail here, each with the reason.
KNOWN_FAILURES: dict[str, str] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def podman() -> AsyncIterator[Containers]:
    async for containers in opened(DockerBackend(engine_settings("podman")), frozenset()):
        yield containers


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(podman: Containers, check: Check) -> None:
    if missing := check.missing(podman.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; run as root, with btrfs")
    await run_check(check, podman.backend, podman.features)
    await podman.leftovers.check()
