"""What depends on which engine it is and where: the network, the filter, the volumes, a limit."""

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
    """The engine's name for the network that was asked for."""
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
    """Those that were asked for, if the operator allows them and the engine can see them."""
    volumes = allowed_volumes(config.volumes, settings.volumes)
    if volumes and engine.endpoint.socket_path is None:
        raise SandboxCreationError(
            f"Volumes are paths of the engine's machine, and {engine.endpoint} is "
            "elsewhere. Copy files in with copy_to().",
            step="volumes",
        )
    return volumes


def seccomp_for(engine: Engine) -> str:
    """The filter, as the engine wants it: Docker in the request, Podman as a file."""
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
    """Podman sets a limit of its own choice if none is given. One above what the service has
    itself may need a right that it lacks; what it has, it can always give."""
    return engine.endpoint.process_limit if engine.is_podman else None
