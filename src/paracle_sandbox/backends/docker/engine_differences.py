"""The differences between engines, by kind and place: network, filter, volumes, process limit."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...config import SandboxConfig
from ...errors import BackendUnavailableError, SandboxCreationError
from ...settings import Settings
from ..machine.volumes import Volume, allowed_volumes
from .engine import Engine
from .spec import seccomp_path, seccomp_profile

logger = logging.getLogger(__name__)


@asynccontextmanager
async def network_for(engine: Engine, config: SandboxConfig) -> AsyncIterator[str]:
    """Hold the network that was asked for, and give the engine's name for it."""
    if config.network_mode == "host":
        logger.warning(
            'network_mode="host" is unsafe: the sandbox has the network of the engine\'s '
            "machine, with every service on its loopback."
        )
    if config.network_mode != "bridge":
        yield config.network_mode
        return
    from .network import bridge

    async with bridge(engine, config) as network:
        yield network


def volumes_for(engine: Engine, config: SandboxConfig, settings: Settings) -> list[Volume]:
    """Return the volumes that were asked for, if the operator allows them and the engine can see
    them."""
    volumes = allowed_volumes(config.volumes, settings.volumes)
    if volumes and engine.endpoint.socket_path is None:
        raise SandboxCreationError(
            f"Volumes are paths of the engine's machine, and {engine.endpoint} is "
            "elsewhere. Copy files in with copy_to().",
            step="volumes",
        )
    return volumes


def seccomp_for(engine: Engine) -> str:
    """Return the filter in the form that the engine wants: Docker takes it in the request, Podman
    as a file."""
    if not engine.is_podman:
        return seccomp_profile()
    if engine.endpoint.socket_path is None:
        raise BackendUnavailableError(
            "Podman takes a system-call filter as a file of its own machine, and "
            f"{engine.endpoint} is elsewhere. Use Podman on this machine, or Docker.",
            step="seccomp",
        )
    return seccomp_path()


def process_limit_for(engine: Engine) -> int | None:
    """Return the limit to name for Podman, which chooses one itself otherwise. Raising a limit
    above that of its service may need a right that it lacks; its own limit it can always give."""
    return engine.endpoint.process_limit if engine.is_podman else None
