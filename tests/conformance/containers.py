"""Run the contract on the backends that use a container engine: the same tests, with different
names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from docker_leftovers import Leftovers

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.settings import Settings, load_settings
from paracle_sandbox.testing.conformance import FEATURES


@dataclass(frozen=True)
class Containers:
    backend: DockerBackend
    features: frozenset[str]
    leftovers: Leftovers


def engine_settings(engine: str) -> Settings:
    """Return settings for the engine of the tests. Skips the test where there is none."""
    engines.require(engine)
    host = engines.PODMAN_HOST if engine == "podman" else engines.DOCKER_HOST
    return load_settings({**_environment(), "DOCKER_HOST": host})


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


async def opened(backend: DockerBackend, lacking: frozenset[str]) -> AsyncIterator[Containers]:
    health = await backend.health()
    assert health.available, health.detail
    features = frozenset(FEATURES) - lacking
    if await backend.store.get() is None:
        features -= {"disk_apart"}
    yield Containers(backend, features, Leftovers(backend))
    await backend.close()
