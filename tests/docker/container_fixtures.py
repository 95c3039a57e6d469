"""Fixtures of the tests on container engines: backends of their own, and what they leave.

``engine`` is the engine under test; a module that tests another than Docker overrides it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pressure
import pytest
from sentry import Sentry

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.gvisor import GvisorBackend
from paracle_sandbox.backends.docker.labels import SESSION
from paracle_sandbox.backends.machine.process_isolation import read_posture
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

Make = Callable[..., Awaitable[Sandbox]]
BACKENDS = {"docker": DockerBackend, "gvisor": GvisorBackend, "podman": DockerBackend}


@pytest.fixture
def engine() -> str:
    return "docker"


@pytest.fixture
def settings(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    engines.require(engine)
    base = tmp_path_factory.mktemp("containers")
    return Settings(
        docker_host=engines.PODMAN_HOST if engine == "podman" else engines.DOCKER_HOST,
        state_dir=str(base / "state"),
        data_dir=str(base / "data"),
        volumes=(str(base / "given"),),
        uid_base=1000,
    )


@pytest.fixture
async def backend(engine: str, settings: Settings) -> AsyncIterator[DockerBackend]:
    backend = BACKENDS[engine](settings)
    yield backend
    left = await backend.list_sandboxes()
    await backend.close()
    assert not [info for info in left if info.owner_pid == os.getpid()]
    assert not list(Path(settings.state_dir).glob("store-*")), "its volume is still mounted"


@pytest.fixture
def native(backend: DockerBackend) -> DockerBackend:
    """What the hostile tests call the backend under test."""
    return backend


@pytest.fixture
async def make(backend: DockerBackend) -> AsyncIterator[Make]:
    started: list[Sandbox] = []

    async def start(config: SandboxConfig | None = None, **options: Any) -> Sandbox:
        sandbox = Sandbox(backend, f"test-{secrets.token_hex(6)}", config, **options)
        started.append(sandbox)
        await sandbox.start()
        await backend.usage(sandbox.sandbox_id)  # it learns the pid, which tests ask for
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop()


@pytest.fixture
async def sandbox(make: Make) -> Sandbox:
    return await make(SandboxConfig(timeout_seconds=120))


@pytest.fixture
def scenes(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scenes of the hostile tests are set on the engine under test, and leave no container. A
    native sandbox in its stead would show nothing."""
    engines.require(engine)
    monkeypatch.setattr(NativeBackend, "__init__", _not_here)
    made: list[DockerBackend] = []

    def kind(settings: Settings) -> DockerBackend:
        made.append(BACKENDS[engine](changed(settings, docker_host=engines.DOCKER_HOST)))
        return made[-1]

    monkeypatch.setattr(pressure.Scene, "kind", staticmethod(kind))
    if engine == "gvisor":
        witness = staticmethod(lambda scene: Sentry(scene.backend))
        monkeypatch.setattr(pressure.Scene, "witness_kind", witness)
    yield
    for backend in made:
        assert engines.containers_with(f"{SESSION}={backend.session}") == []


def _not_here(*_: object) -> NoReturn:
    pytest.fail("a test of an engine makes native sandboxes")


@pytest.fixture
def host_uid(backend: DockerBackend) -> Callable[[Sandbox], int]:
    def uid(sandbox: Sandbox) -> int:
        return read_posture(backend.init_pid(sandbox.sandbox_id)).uids[0]

    return uid


def changed(settings: Settings, **changes: Any) -> Settings:
    return replace(settings, **changes)
