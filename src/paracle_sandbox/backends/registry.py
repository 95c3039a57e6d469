"""Backends by name, and which of them ``auto`` takes.

Names map to dotted paths, so that choosing one backend never imports another.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import cast

from ..errors import BackendUnavailableError
from ..settings import Settings
from .base import Backend, Health

logger = logging.getLogger(__name__)

BACKENDS = {
    "native": "paracle_sandbox.backends.native.backend:NativeBackend",
    "docker": "paracle_sandbox.backends.docker.backend:DockerBackend",
    "gvisor": "paracle_sandbox.backends.docker.gvisor:GvisorBackend",
    "incus": "paracle_sandbox.backends.incus.backend:IncusBackend",
    "incus-vm": "paracle_sandbox.backends.incus.machine:IncusMachineBackend",
    "remote": "paracle_sandbox.backends.remote.backend:RemoteBackend",
    "daytona": "paracle_sandbox.backends.daytona.backend:DaytonaBackend",
    "fake": "paracle_sandbox.testing.fake:FakeBackend",
}
_WITH_RUNTIME = ("docker", "gvisor")
_PROBE_SECONDS = 3.0
AUTO_ORDER = ("remote", "native", "docker", "incus")


def get_backend(name: str | None, settings: Settings, runtime: str | None = None) -> Backend:
    """A new backend; the caller keeps and closes it. ``None`` means the one of the settings, and
    ``runtime`` is for those of containers.

    Nothing is probed here: a machine that cannot do it answers when a sandbox is created.
    Raises BackendUnavailableError for a name that is unknown.
    """
    wanted = name or settings.mode
    chosen = _choose(settings) if wanted == "auto" else _real_name(wanted, settings)
    if chosen not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise BackendUnavailableError(f"There is no backend {chosen!r}; known are {known}.")
    if runtime is not None and chosen not in _WITH_RUNTIME:
        raise BackendUnavailableError(f"The {chosen} backend has no runtime to choose.")
    if chosen == "fake":
        logger.warning("The fake backend isolates nothing: programs run as plain processes.")
    module, _, attribute = BACKENDS[chosen].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    if chosen in _WITH_RUNTIME:
        return cast(Backend, factory(settings, runtime))
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
        return Health(name, False, error.message)
    try:
        return await backend.health()
    finally:
        await backend.close()


def _choose(settings: Settings) -> str:
    # Native needs Linux; an engine may well run in a virtual machine.
    here = "native" if sys.platform == "linux" else "docker"
    if settings.api_url:
        problem = service_problem(settings)
        if problem is None:
            return "remote"
        logger.warning("The service of SANDBOX_API_URL is not used (%s); using %s.", problem, here)
    return here


def service_problem(settings: Settings) -> str | None:
    """Why the configured service cannot be used; None when it can. Takes a few seconds at most,
    and needs nothing installed: the remote backend is imported only when it is taken."""
    import urllib.error
    import urllib.request

    address = f"{(settings.api_url or '').rstrip('/')}/info"
    headers = {"X-API-Key": settings.api_key or ""}
    if not address.startswith(("http://", "https://")):
        return "its address is not http or https"
    try:
        request = urllib.request.Request(address, headers=headers)  # noqa: S310  checked above
        with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        with error:
            return "it refuses the key" if error.code == 401 else f"it answers {error.code}"
    except (OSError, ValueError) as error:
        return f"it cannot be reached: {error}"


def _real_name(name: str, settings: Settings) -> str:
    if name == "local":
        return "docker"
    # INCUS_SANDBOX_TYPE=vm is the older way to ask for a virtual machine.
    return "incus-vm" if name == "incus" and settings.incus_type == "vm" else name
