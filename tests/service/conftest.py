"""Services of these tests are real processes: one over plain processes for what is only HTTP,
one over native sandboxes for what is not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from service_place import Place
from service_process import ServiceProcess

ROOMY = {
    "SANDBOX_MAX_CONTAINERS": "300", "SANDBOX_USER_SANDBOXES": "50", "SANDBOX_USER_CPU": "1000",
    "SANDBOX_USER_MEMORY": "1000g", "SANDBOX_USER_DISK": "1000g", "SANDBOX_USER_RATE": "100000",
}  # fmt: skip


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """It isolates nothing: only for what happens before a sandbox."""
    process = ServiceProcess(tmp_path_factory.mktemp("fake"), SANDBOX_MODE="fake", **ROOMY).start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def native_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    process = ServiceProcess(tmp_path_factory.mktemp("probe"))
    health = process.paracle("sandbox", "health", "--backend", "native")
    if health.returncode:
        pytest.skip(f"native sandboxes are not available: {health.stdout[-500:]}")


@pytest.fixture(scope="session")
def native(
    tmp_path_factory: pytest.TempPathFactory, native_works: None
) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path_factory.mktemp("native"), **ROOMY).start()
    yield process
    process.stop()


@pytest.fixture
def client(fake: ServiceProcess) -> Iterator[httpx2.Client]:
    with fake.client() as client:
        yield client


@pytest.fixture
def real(native: ServiceProcess) -> Iterator[httpx2.Client]:
    with native.client() as client:
        yield client


@pytest.fixture
def user(request: pytest.FixtureRequest) -> str:
    """A user of this test alone."""
    return request.node.name[:80].replace("/", "|")


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """A service in this process, in which ann has a sandbox."""
    place = Place(tmp_path)
    await place.service.start()
    assert (await place.shell("echo here > kept"))["recreated"] is False
    yield place
    await place.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small disk needs root and mount; run as root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
