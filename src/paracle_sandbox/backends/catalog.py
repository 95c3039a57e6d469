"""What the ways in may ask about the backends of this machine without naming one of them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from ..errors import BackendUnavailableError, SandboxError
from ..own_directory import STATE_DIRECTORY
from ..settings import Settings
from .auto import PROBLEMS
from .base import Backend, Health, SandboxInfo
from .registry import BACKENDS, explain, get_backend, real_name, require_linux

if TYPE_CHECKING:
    from aiodocker import Docker

    from .incus.image_build import Built as Built
    from .incus.image_build import ImageBuilder as ImageBuilder
    from .native.templates import Template as Template
    from .native.templates import Templates as Templates

# The fake backend's sandboxes live and die inside one process: no other can see them. Those of a
# remote service and of Daytona are not of this machine.
_ENGINES = {"docker": "docker", "gvisor": "docker", "incus": "incus", "incus-vm": "incus"}
_LISTED = tuple(name for name in BACKENDS if name not in ("fake", "remote", "daytona"))


@asynccontextmanager
async def opened(name: str | None, settings: Settings) -> AsyncIterator[Backend]:
    """A backend for the length of a block. Raises BackendUnavailableError."""
    backend = get_backend(name, settings)
    try:
        yield backend
    finally:
        await backend.close()


async def examine(name: str | None, settings: Settings) -> list[Health]:
    """The health of one backend, or of all: see ``explain``."""
    wanted = name or settings.mode
    if wanted == "auto":
        return await explain(settings)
    try:
        async with opened(wanted, settings) as backend:
            return [await backend.health()]
    except BackendUnavailableError as error:
        return [Health(wanted, False, error.message)]


def taken(name: str | None, settings: Settings) -> str:
    """What a name stands for on this machine; without one, that of the settings."""
    return real_name(name or settings.mode, settings, quiet=True)


async def listed(
    settings: Settings, stack: AsyncExitStack, only: str | None
) -> list[tuple[Backend, SandboxInfo]]:
    """The sandboxes of the backend ``only``; without one, of each whose sandboxes can be seen from
    any process of this machine. Whichever is named has to be there: else raises
    BackendUnavailableError, and so does a state directory of another user. The backends stay open
    as long as the stack."""
    found = []
    for name in _asked(only, settings):
        try:
            backend = await stack.enter_async_context(opened(name, settings))
            found += [(backend, info) for info in await backend.list_sandboxes()]
        except BackendUnavailableError as error:
            if name == only or error.step == STATE_DIRECTORY:
                raise
    return found


async def sweep(settings: Settings, only: str | None = None) -> int:
    """Remove what dead processes left, of the same backends; how many sandboxes that were."""
    swept = 0
    for name in _asked(only, settings):
        try:
            async with opened(name, settings) as backend:
                swept += await backend.sweep()
        except BackendUnavailableError as error:
            if name == only or error.step == STATE_DIRECTORY:
                raise
    return swept


def _asked(only: str | None, settings: Settings) -> list[str]:
    """A backend that is named, or those of this machine that have an engine to be asked: the
    client libraries of the others take longer to import than all else that is done here."""
    if only is not None and only != "auto":
        return [only]
    absent = {name for name in _ENGINES.values() if PROBLEMS[name](settings) is not None}
    return [name for name in _LISTED if _ENGINES.get(name) not in absent]


def inside_container(container: str, settings: Settings) -> Backend:
    """Guests in a container that somebody else started. Raises SandboxCreationError."""
    from .docker.existing_container import InsideBackend

    return InsideBackend(container, settings)


def entrance(info: SandboxInfo, settings: Settings) -> Backend:
    """A way into a sandbox that another process made. Raises SandboxError that says why there is
    none."""
    if info.backend in ("docker", "gvisor"):
        from .docker.labels import container_name

        return inside_container(container_name(info.sandbox_id), settings)
    if info.backend in ("remote", "daytona"):
        raise SandboxError(
            f"Sandbox {info.sandbox_id} is lent to the client that made it, and a service lends "
            "each to one client at a time. Use it from there; to remove it: paracle sandbox rm.",
            info.sandbox_id,
        )
    raise SandboxError(
        f"Sandbox {info.sandbox_id} can be used only by process {info.owner_pid}, which made it "
        f"and holds the only way in, and it ends with that process. Use it from there, choose a "
        f"backend whose sandboxes can be entered (docker, gvisor), or start one with a shell: "
        f"paracle sandbox execute -it -- sh",
        info.sandbox_id,
    )


def engine_client(settings: Settings) -> AbstractAsyncContextManager[Docker]:
    """The client library of the container engine, closed after the block. Raises
    DockerConnectionError when the engine cannot be spoken to."""
    from .docker.engine import opened_client

    return opened_client(settings)


def templates(settings: Settings) -> Templates:
    """The templates of this user. Raises BackendUnavailableError where there is no Linux."""
    require_linux("Templates are for native sandboxes, which")
    from .native.templates import Templates

    return Templates(settings)


def template_names() -> list[str]:
    """Those there are, built or not; none where there is no Linux."""
    if sys.platform != "linux":
        return []
    from .native.template_kinds import PACKAGES

    return list(PACKAGES)


def incus_images(settings: Settings) -> ImageBuilder:
    """The images of the Incus server. ``async with`` it. Raises BackendUnavailableError."""
    from .incus.image_build import ImageBuilder

    return ImageBuilder(settings)
