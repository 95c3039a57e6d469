"""Backends by name.

Names map to dotted paths, so that choosing one backend never imports another.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import cast

from ..errors import BackendUnavailableError
from ..host.platforms import system_name
from ..settings import Settings
from .auto import AUTO_ORDER, choose
from .base import Backend, Health

logger = logging.getLogger(__name__)

BACKENDS = {
    "native": "paracle_sandbox.backends.native.backend:NativeBackend",
    "docker": "paracle_sandbox.backends.docker.backend:DockerBackend",
    "gvisor": "paracle_sandbox.backends.docker.gvisor:GvisorBackend",
    "incus": "paracle_sandbox.backends.incus.backend:IncusBackend",
    "incus-vm": "paracle_sandbox.backends.incus.vm:IncusMachineBackend",
    "remote": "paracle_sandbox.backends.remote.backend:RemoteBackend",
    "daytona": "paracle_sandbox.backends.daytona.backend:DaytonaBackend",
    "fake": "paracle_sandbox.testing.fake:FakeBackend",
}
_WITH_RUNTIME = ("docker", "gvisor")


def get_backend(name: str | None, settings: Settings, runtime: str | None = None) -> Backend:
    """A new backend; the caller keeps and closes it. ``None`` means the one of the settings, and
    ``runtime`` is for those of containers.

    No backend is proved here: a machine that cannot do it answers when a sandbox is created.
    Raises BackendUnavailableError for a name that is unknown, and for native without Linux.
    """
    chosen = real_name(name or settings.mode, settings)
    if chosen not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise BackendUnavailableError(f"There is no backend {chosen!r}; known are {known}.")
    if runtime is not None and chosen not in _WITH_RUNTIME:
        raise BackendUnavailableError(f"The {chosen} backend has no runtime to choose.")
    if chosen == "fake":
        logger.warning("The fake backend isolates nothing: programs run as plain processes.")
    if chosen == "native":
        require_linux()
    module, _, attribute = BACKENDS[chosen].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    if chosen in _WITH_RUNTIME:
        return cast(Backend, factory(settings, runtime))
    return cast(Backend, factory() if chosen == "fake" else factory(settings))


def require_linux(what: str = "Native sandboxes") -> None:
    """Before anything of native is imported: Windows lacks the modules of Python that it uses."""
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"{what} need Linux, and this is {system_name()}. Use Docker (SANDBOX_MODE=docker) or "
            "a remote service (SANDBOX_MODE=remote)."
        )


async def explain(settings: Settings) -> list[Health]:
    """Every backend, each proved by using it: first those that ``auto`` chooses from, in its
    order, then those that one has to ask for."""
    others = [name for name in BACKENDS if name not in (*AUTO_ORDER, "fake")]
    return [await _health_of(name, settings) for name in (*AUTO_ORDER, *others)]


async def _health_of(name: str, settings: Settings) -> Health:
    if name == "remote" and not settings.api_url:
        return Health(name, False, "not configured", "set SANDBOX_API_URL")
    if name == "daytona" and not settings.daytona_key:
        return Health(name, False, "not configured", "set DAYTONA_API_KEY")
    try:
        backend = get_backend(name, settings)
    except BackendUnavailableError as error:
        return Health(name, False, error.message)
    try:
        return await backend.health()
    finally:
        await backend.close()


def real_name(name: str, settings: Settings, *, quiet: bool = False) -> str:
    """What a name stands for: some are older, and ``auto`` is what can be had. ``quiet`` is for
    who only asks: whoever makes the backend hears which others were passed over."""
    if name == "auto":
        name = choose(settings, quiet=quiet)
    if name == "local":
        return "docker"
    # INCUS_SANDBOX_TYPE=vm is the older way to ask for a virtual machine.
    return "incus-vm" if name == "incus" and settings.incus_type == "vm" else name
