"""The policy for configurations that callers send: never more than the operator's settings."""

from __future__ import annotations

import re

from ...backends.machine.volumes import allowed_volumes
from ...config import SandboxConfig
from ...errors import SandboxCreationError
from ...settings import Settings
from ..errors import BadRequest

_NETWORKS = ("none", "bridge", "host")
# The images of this package, and plain Python. Any other would be fetched from anywhere.
_IMAGE = re.compile(r"(paracle/sandbox|python)(:[A-Za-z0-9._-]{1,128})?\Z")


def checked_config(settings: Settings, config: SandboxConfig) -> SandboxConfig:
    """Return the configuration. Raises BadRequest, or SandboxCreationError for an image."""
    if _NETWORKS.index(config.network_mode) > _NETWORKS.index(settings.network_mode):
        raise BadRequest(
            f"network_mode {config.network_mode!r} is more than this service gives: "
            f"{settings.network_mode!r} (PARACLE_SANDBOX_NETWORK_MODE)"
        )
    if settings.drop_capabilities and not config.drop_capabilities:
        raise BadRequest("This service drops every capability (PARACLE_SANDBOX_DROP_CAPABILITIES)")
    try:
        allowed_volumes(config.volumes, settings.volumes)
    except SandboxCreationError:
        # The message does not say what exists or is allowed: that is for the operator.
        raise BadRequest("volumes: this service does not give these directories") from None
    if config.allow_degraded:
        raise BadRequest("allow_degraded is the operator's to say, not the caller's")
    if config.base_image != settings.service_image and not _IMAGE.match(config.base_image):
        raise SandboxCreationError(
            f"Image not found: {config.base_image}. This service has paracle/sandbox:*, python:* "
            f"and {settings.service_image}."
        )
    return config
