"""Backends by name, and which of them ``auto`` takes.

Names map to dotted paths, so that choosing one backend never imports another.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import cast

from ..errors import BackendUnavailableError, DockerConnectionError
from ..settings import Settings
from .base import Backend, Health

logger = logging.getLogger(__name__)

BACKENDS = {
    "native": "paracle_sandbox.backends.native.backend:NativeBackend",
    "daytona": "paracle_sandbox.backends.daytona.backend:DaytonaBackend",
    "fake": "paracle_sandbox.testing.fake:FakeBackend",
}
# Known by name, but not part of this version: what to say to someone who asks for one.
LATER = {
    "remote": "set SANDBOX_MODE=native meanwhile",
    "docker": "install Docker and a later paracle-sandbox[docker]; or set SANDBOX_MODE=native",
    "gvisor": "install Docker, runsc and a later paracle-sandbox[docker]",
    "incus": "install Incus and a later paracle-sandbox[incus]; or set SANDBOX_MODE=native",
    "incus-vm": "install Incus and a later paracle-sandbox[incus]",
}
AUTO_ORDER = ("remote", "native", "docker", "incus")


def get_backend(name: str | None, settings: Settings) -> Backend:
    """A new backend; the caller keeps and closes it. ``None`` means the one of the settings.

    Nothing is probed here: a machine that cannot do it answers when a sandbox is created.
    Raises BackendUnavailableError for a name that is unknown or not in this version.
    """
    wanted = name or settings.mode
    chosen = _choose(settings) if wanted == "auto" else _real_name(wanted, settings)
    if chosen in LATER:
        raise _not_here(chosen)
    if chosen not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS, *LATER])
        raise BackendUnavailableError(f"There is no backend {chosen!r}; known are {known}.")
    if chosen == "fake":
        logger.warning("The fake backend isolates nothing: programs run as plain processes.")
    module, _, attribute = BACKENDS[chosen].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    return cast(Backend, factory() if chosen == "fake" else factory(settings))


async def explain(settings: Settings) -> list[Health]:
    """Why ``auto`` takes what it takes: every candidate in order, each proved by using it."""
    return [await _health_of(name, settings) for name in AUTO_ORDER]


async def _health_of(name: str, settings: Settings) -> Health:
    if name == "remote" and not settings.api_url:
        return Health(name, False, "not configured", "set SANDBOX_API_URL")
    try:
        backend = get_backend(name, settings)
    except BackendUnavailableError as error:
        return Health(name, False, error.message, LATER.get(name, ""))
    try:
        return await backend.health()
    finally:
        await backend.close()


def _choose(settings: Settings) -> str:
    if settings.api_url:
        logger.warning(
            "SANDBOX_API_URL is set, but this version has no remote backend; using native."
        )
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"No backend works on {sys.platform} in this version: native needs Linux. "
            "Use a Linux machine, a virtual machine or WSL 2."
        )
    return "native"


def _real_name(name: str, settings: Settings) -> str:
    if name == "local":
        return "docker"
    # INCUS_SANDBOX_TYPE=vm is the older way to ask for a virtual machine.
    return "incus-vm" if name == "incus" and settings.incus_type == "vm" else name


def _not_here(name: str) -> BackendUnavailableError:
    kind = DockerConnectionError if name in ("docker", "gvisor") else BackendUnavailableError
    subject = "Docker" if name == "docker" else f"The {name} backend"
    return kind(f"{subject} not available: not in this version. To have it, {LATER[name]}.")
