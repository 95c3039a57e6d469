"""The remote backend keeps the contract, against a real service over containers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from checks import parameters
from test_remote import ROOMY, ServiceProcess

import engines
from paracle_sandbox.backends.remote.backend import RemoteBackend
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.conformance import FEATURES, Check, run_check

# The checks that fail here, each with the reason. One that passes by accident fails the run.
KNOWN_FAILURES: dict[str, str] = {}


@dataclass(frozen=True)
class Remote:
    backend: RemoteBackend
    features: frozenset[str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    engines.require("docker")
    home = tmp_path_factory.mktemp("remote-docker")
    process = ServiceProcess(
        home, **ROOMY, SANDBOX_MODE="docker", DOCKER_HOST=engines.DOCKER_HOST
    ).start()
    yield process
    process.stop()
    assert _containers_of(process) == []


def _containers_of(process: ServiceProcess) -> list[str]:
    """Return the containers with the mark of this installation, which is derived from its key."""
    from paracle_sandbox.service.users.names import Names

    mark = Names(process.data).installation
    words = ["ps", "-a", "--filter", "label=paracle.managed=true"]
    listed = subprocess.run(
        ["docker", *words, "--format", '{{.Names}} {{.Label "paracle.labels"}}'],
        env={**os.environ, "DOCKER_HOST": engines.DOCKER_HOST},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in listed.stdout.splitlines() if mark in line]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(service: ServiceProcess) -> AsyncIterator[Remote]:
    backend = RemoteBackend(Settings(api_url=service.url, api_key=service.key))
    health = await backend.health()
    assert health.available, health
    in_force = {layer.name for layer in health.layers if layer.in_force}
    features = frozenset(FEATURES)
    if "disk limit apart from memory" not in in_force:
        features -= {"disk_apart"}
    yield Remote(backend, features)
    assert await backend.list_sandboxes() == []
    await backend.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(remote: Remote, check: Check) -> None:
    if missing := check.missing(remote.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; run as root, with btrfs")
    await run_check(check, remote.backend, remote.features)
