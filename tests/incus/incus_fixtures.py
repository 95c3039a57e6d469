"""Fixtures of the tests on an Incus server: a backend of their own, and what it leaves."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pressure
import pytest

import engines
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.spec import OWN_PROCESSES
from paracle_sandbox.backends.machine.process_isolation import read_posture
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

Make = Callable[..., Awaitable[Sandbox]]
CONFIG = SandboxConfig(base_image=engines.INCUS_IMAGE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module may leave out single forms of tests that it has from elsewhere."""
    left_out = [getattr(getattr(item, "module", None), "NOT_ON_INCUS", ()) for item in items]
    items[:] = [item for item, names in zip(items, left_out, strict=True) if item.name not in names]


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    engines.require("incus")
    base = tmp_path_factory.mktemp("incus")
    return Settings(
        incus_socket=engines.INCUS_SOCKET,
        incus_image=engines.INCUS_IMAGE,
        incus_warm=0,
        incus_conf=str(base / "client"),
        state_dir=str(base / "state"),
        data_dir=str(base / "data"),
        # The server maps the ids of instances into this range.
        uid_base=1_000_000,
    )


@pytest.fixture
async def backend(settings: Settings) -> AsyncIterator[IncusBackend]:
    backend = IncusBackend(settings)
    # Before a test looks at what is mounted.
    await backend.homes.store.get()
    yield backend
    left = await backend.list_sandboxes()
    await backend.close()
    assert not [info for info in left if info.owner_pid == os.getpid()]
    assert not list(Path(settings.state_dir).glob("store-*")), "its volume is still mounted"


@pytest.fixture
def native(backend: IncusBackend) -> IncusBackend:
    """What the hostile tests call the backend under test."""
    return backend


@pytest.fixture
async def make(backend: IncusBackend) -> AsyncIterator[Make]:
    started: list[Sandbox] = []

    async def start(config: SandboxConfig | None = None, **options: Any) -> Sandbox:
        sandbox_id = f"test-{secrets.token_hex(6)}"
        sandbox = Sandbox(backend, sandbox_id, of_image(config), **options)
        started.append(sandbox)
        await sandbox.start()
        await backend.usage(sandbox.sandbox_id)  # it learns the cgroup, which tests ask for
        return sandbox

    yield start
    for sandbox in started:
        await sandbox.stop()


def of_image(config: SandboxConfig | None) -> SandboxConfig:
    """On the image of the tests."""
    changes = {"base_image": engines.INCUS_IMAGE}
    return SandboxConfig(**{**(config or SandboxConfig()).model_dump(), **changes})


@pytest.fixture
async def sandbox(make: Make) -> Sandbox:
    return await make(SandboxConfig(timeout_seconds=120))


@pytest.fixture
def scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenes of the hostile tests are set on the server."""
    engines.require("incus")

    def kind(settings: Settings) -> IncusBackend:
        conf = str(Path(settings.state_dir).parent / "client")
        return IncusBackend(
            replace(settings, incus_socket=engines.INCUS_SOCKET, incus_warm=0, incus_conf=conf)
        )

    def configure(**options: Any) -> SandboxConfig:
        return SandboxConfig(base_image=engines.INCUS_IMAGE, **options)

    monkeypatch.setattr(pressure.Scene, "kind", staticmethod(kind))
    monkeypatch.setattr(pressure.Scene, "configure", staticmethod(configure))
    monkeypatch.setattr(pressure.Scene, "beside", OWN_PROCESSES)


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown here is not shown by a native sandbox."""

    async def refuse(*_: object) -> None:
        raise AssertionError("a native sandbox, in a test of Incus")

    monkeypatch.setattr(NativeBackend, "create", refuse)


@pytest.fixture
def host_uid(backend: IncusBackend) -> Callable[[Sandbox], int]:
    def uid(sandbox: Sandbox) -> int:
        return read_posture(backend.init_pid(sandbox.sandbox_id)).uids[0]

    return uid
