"""Sandboxes of these tests are on their own: own records, own volume, no packages to install."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from paracle_sandbox import LocalSandboxClient, Sandbox, SandboxConfig, SandboxManager


@pytest.fixture(scope="session", autouse=True)
def own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.mktemp("paracle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARACLE_TEMPLATE_BUILD", "0")
        for name in ("PARACLE_STATE_DIR", "PARACLE_DATA_DIR"):
            if name not in os.environ:
                patch.setenv(name, str(base / name.lower()))
        yield


@pytest.fixture
async def client() -> AsyncIterator[LocalSandboxClient]:
    async with LocalSandboxClient(config=SandboxConfig()) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Sandbox]:
    """Return one sandbox for a module whose tests do not disturb each other."""
    async with SandboxManager() as manager, manager.managed_sandbox() as sandbox:
        yield sandbox
