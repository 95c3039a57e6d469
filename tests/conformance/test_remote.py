"""The remote backend keeps the contract, against a real service over native sandboxes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from checks import parameters
from test_native import ALWAYS, REMEDY, WITH_CGROUPS, WITH_VOLUME

from paracle_sandbox.backends.remote.backend import RemoteBackend
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.conformance import Check, run_check

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "service"))
from service_process import ServiceProcess  # noqa: E402

# The checks that fail here, each with the reason. One that passes by accident fails the run.
KNOWN_FAILURES: dict[str, str] = {}

ROOMY = {
    "SANDBOX_MAX_CONTAINERS": "200", "SANDBOX_USER_SANDBOXES": "200", "SANDBOX_USER_CPU": "1000",
    "SANDBOX_USER_MEMORY": "1000g", "SANDBOX_USER_DISK": "1000g", "SANDBOX_USER_RATE": "1000000",
    "SANDBOX_USER_CONCURRENT": "1000",
}  # fmt: skip


@dataclass(frozen=True)
class Remote:
    backend: RemoteBackend
    features: frozenset[str]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path_factory.mktemp("remote"), **ROOMY)
    health = process.paracle("sandbox", "health", "--backend", "native")
    if health.returncode:
        pytest.skip(f"native sandboxes are not available: {health.stdout[-500:]}")
    process.start()
    yield process
    process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def remote(service: ServiceProcess) -> AsyncIterator[Remote]:
    backend = RemoteBackend(Settings(api_url=service.url, api_key=service.key))
    health = await backend.health()
    assert health.available, health
    in_force = {layer.name for layer in health.layers if layer.in_force}
    features = ALWAYS
    features |= WITH_CGROUPS if "memory limit" in in_force else frozenset()
    features |= WITH_VOLUME if "disk limit apart from memory" in in_force else frozenset()
    yield Remote(backend, features)
    assert await backend.list_sandboxes() == []
    await backend.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", parameters(KNOWN_FAILURES))
async def test_contract(remote: Remote, check: Check) -> None:
    if missing := check.missing(remote.features):
        pytest.skip(f"not kept on this machine: {', '.join(missing)}; {REMEDY}")
    await run_check(check, remote.backend, remote.features)
