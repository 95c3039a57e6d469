"""network_mode: none is no card at all; bridge is one filtered card; host cannot be had."""

from __future__ import annotations

from ...config import SandboxConfig
from ...errors import SandboxCreationError
from .refusals import no_network
from .server import Server
from .spec import Nic


async def nic_for(server: Server, config: SandboxConfig) -> Nic | None:
    if config.network_mode == "none":
        return None
    if config.network_mode == "host":
        raise SandboxCreationError(
            'An Incus instance cannot share the network of its machine: use network_mode="bridge", '
            "or another backend.",
            step="network",
        )
    raise no_network()
