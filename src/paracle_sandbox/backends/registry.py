"""Backends by name: which there are, which one ``auto`` takes, what the ways in may ask of them.

The list of names is in ``host.backend_names``. Choosing one backend never imports another, and
whatever names a concrete backend for a layer above does so here, inside a function. Backends of
other distributions are made here as well, and whatever is wrong with one is its own: it is reported
with the name of its distribution, and keeps no other backend from being used or listed.

``auto`` takes the first of ``AUTO_ORDER`` that can be had. Looking must cost nothing where native
can be had, which is nearly everywhere: it reads a few small files and starts nothing. Only in a
process that a seccomp filter or a profile of AppArmor confines it also makes some system calls, to
see which of them are refused, and has the steps of a start tried. It is no proof;
``paracle sandbox health`` is.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..errors import BackendUnavailableError, SandboxError
from ..host.backend_names import BACKENDS, known_names, outside_backends
from ..host.own_directory import STATE_DIRECTORY
from ..host.platforms import system_name
from ..settings import Settings
from .base import Backend, Health, SandboxInfo

if TYPE_CHECKING:
    from aiodocker import Docker

    from .incus.image_build import Built as Built
    from .incus.image_build import ImageBuilder as ImageBuilder
    from .native.templates import Template as Template
    from .native.templates import Templates as Templates

logger = logging.getLogger(__name__)

_WITH_RUNTIME = ("docker", "gvisor")
# The fake backend's sandboxes live and die inside one process: no other can see them. Those of a
# remote service and of Daytona are not of this machine.
_LISTED = tuple(name for name in BACKENDS if name not in ("fake", "remote", "daytona"))

# -- open one ---------------------------------------------------------------------------------


def get_backend(name: str | None, settings: Settings, runtime: str | None = None) -> Backend:
    """A new backend; the caller keeps and closes it. ``None`` means the one of the settings, and
    ``runtime`` is for those of containers.

    No backend is proved here: a machine that cannot do it answers when a sandbox is created.
    Raises BackendUnavailableError for a name that is unknown, for native without Linux, and for a
    backend of another distribution that cannot be made.
    """
    chosen = resolve_name(name, settings)
    if runtime is not None and chosen not in _WITH_RUNTIME:
        raise BackendUnavailableError(f"The {chosen} backend has no runtime to choose.")
    if chosen not in BACKENDS:
        return _make_outside(chosen, settings)
    if chosen == "fake":
        logger.warning("The fake backend isolates nothing: programs run as plain processes.")
    if chosen == "native":
        require_linux()
    factory = _import(BACKENDS[chosen])
    if chosen in _WITH_RUNTIME:
        return cast(Backend, factory(settings, runtime))
    return cast(Backend, factory() if chosen == "fake" else factory(settings))


@asynccontextmanager
async def open_backend(name: str | None, settings: Settings) -> AsyncIterator[Backend]:
    """A backend for the length of a block. Raises BackendUnavailableError."""
    backend = get_backend(name, settings)
    try:
        yield backend
    finally:
        await _close(backend)


async def _close(backend: Backend) -> None:
    try:
        with _blaming(backend.name):
            await backend.close()
    except BackendUnavailableError as error:
        if backend.name in BACKENDS:
            raise
        logger.warning("%s", error.message)


def _make_outside(name: str, settings: Settings) -> Backend:
    """A backend of another distribution. Raises BackendUnavailableError."""
    claims = outside_backends().get(name)
    if not claims:
        known = ", ".join(known_names())
        raise BackendUnavailableError(f"There is no backend {name!r}; known are {known}.")
    if len(claims) > 1:
        several = " and ".join(claim.source for claim in claims)
        raise BackendUnavailableError(
            f"Several distributions bring a backend {name!r}: {several}. Remove all but one."
        )
    with _blaming(name):
        point = claims[0].point
        backend = point.load()(settings)
        if not isinstance(backend, Backend):
            raise TypeError(f"{point.value} makes no paracle_sandbox.backends.base.Backend")
        if backend.name != name:
            raise ValueError(f"{point.value} has the name {backend.name!r}, not {name!r}")
        return backend


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Whatever the code of another distribution raises becomes BackendUnavailableError with the
    name of the distribution. Errors of our own backends pass unchanged."""
    try:
        yield
    except BackendUnavailableError:
        raise
    except (Exception, SystemExit) as error:
        if name in BACKENDS:
            raise
        source = " and ".join(claim.source for claim in outside_backends().get(name, ()))
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise BackendUnavailableError(
            f"The backend {name!r} of {source or 'another distribution'} fails: {reason}"
        ) from error


def require_linux(what: str = "Native sandboxes") -> None:
    """Refuse before anything of native is imported: Windows lacks the modules that it uses."""
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"{what} need Linux, and this is {system_name()}. Use Docker (SANDBOX_MODE=docker) or "
            "a remote service (SANDBOX_MODE=remote)."
        )


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


# -- what a name stands for -------------------------------------------------------------------

Problem = Callable[[Settings], str | None]


def _look_at(path: str) -> Problem:
    """Import the function only when somebody looks: looking at one backend imports no other."""
    return lambda settings: cast(Problem, _import(path))(settings)


# What ``auto`` may take, in its order, and what says why it cannot be had: None when it can.
PROBLEMS: Mapping[str, Problem] = {
    "remote": _look_at("paracle_sandbox.backends.remote.reachability:service_problem"),
    "native": _look_at("paracle_sandbox.backends.native.obstacles:problem"),
    "docker": _look_at("paracle_sandbox.backends.docker.endpoint:problem"),
    "incus": _look_at("paracle_sandbox.backends.incus.remotes:problem"),
}
AUTO_ORDER = tuple(PROBLEMS)


def resolve_name(name: str | None, settings: Settings, *, quiet: bool = False) -> str:
    """The backend that a name stands for on this machine; without a name, that of the settings.
    Some names are older ones, and ``auto`` is what can be had. ``quiet`` is for callers that only
    ask: the one that makes the backend logs which others were passed over."""
    name = name or settings.mode
    if name == "auto":
        name = choose(settings, quiet=quiet)
    if name == "local":
        return "docker"
    # INCUS_SANDBOX_TYPE=vm is the older way to ask for a virtual machine.
    return "incus-vm" if name == "incus" and settings.incus_type == "vm" else name


def choose(
    settings: Settings,
    problems: Mapping[str, Problem] | None = None,
    platform: str = sys.platform,
    *,
    quiet: bool = False,
) -> str:
    """The first backend that has no problem. When all have one, the first of this machine: its
    error then names cause and remedy. Unless ``quiet``, logs a warning with what was not taken,
    and why."""
    problems = problems or PROBLEMS
    candidates = [
        name
        for name in AUTO_ORDER
        # Native needs Linux; an engine may well run in a virtual machine.
        if (name != "remote" or settings.api_url) and (name != "native" or platform == "linux")
    ]
    passed_over: dict[str, str] = {}
    for name in candidates:
        problem = problems[name](settings)
        if problem is None:
            chosen = name
            break
        passed_over[name] = f"not {name}: {problem.rstrip('.')}"
    else:
        chosen = next(name for name in candidates if name != "remote")
        del passed_over[chosen]
    if passed_over and not quiet:
        reasons = "; ".join(passed_over.values())
        logger.warning("SANDBOX_MODE=auto is using %s; %s", chosen, reasons)
    return chosen


# -- health -----------------------------------------------------------------------------------


async def examine(name: str | None, settings: Settings) -> list[Health]:
    """The health of one backend; for ``auto``, of all."""
    wanted = name or settings.mode
    return await explain(settings) if wanted == "auto" else [await _health_of(wanted, settings)]


async def explain(settings: Settings) -> list[Health]:
    """Every backend, each proved by using it: first those that ``auto`` chooses from, in its
    order, then those that have to be asked for by name."""
    others = [name for name in BACKENDS if name not in (*AUTO_ORDER, "fake")]
    found = []
    for name in (*AUTO_ORDER, *others, *outside_backends()):
        if name == "remote" and not settings.api_url:
            found.append(Health(name, False, "not configured", "set SANDBOX_API_URL"))
        elif name == "daytona" and not settings.daytona_key:
            found.append(Health(name, False, "not configured", "set DAYTONA_API_KEY"))
        else:
            found.append(await _health_of(name, settings))
    return found


async def _health_of(name: str, settings: Settings) -> Health:
    try:
        async with open_backend(name, settings) as backend:
            with _blaming(backend.name):
                return replace(await backend.health(), backend=backend.name)
    except BackendUnavailableError as error:
        return Health(name, False, error.message)


# -- the sandboxes of this machine ------------------------------------------------------------


async def find_sandboxes(
    settings: Settings, stack: AsyncExitStack, only: str | None
) -> list[tuple[Backend, SandboxInfo]]:
    """The sandboxes of the backend ``only``; without one, of each whose sandboxes can be seen from
    any process of this machine. Raises BackendUnavailableError when the named backend is not
    there, and for a state directory of another user. The backends stay open as long as the
    stack."""
    found = []
    for name in _names_to_ask(only):
        try:
            backend = await stack.enter_async_context(open_backend(name, settings))
            with _blaming(backend.name):
                found += [(backend, info) for info in await backend.list_sandboxes()]
        except BackendUnavailableError as error:
            if name == only or error.step == STATE_DIRECTORY:
                raise
    return found


async def sweep(settings: Settings, only: str | None = None) -> int:
    """Remove what dead processes left, of the same backends. Returns how many sandboxes that
    were."""
    swept = 0
    for name in _names_to_ask(only):
        try:
            async with open_backend(name, settings) as backend:
                with _blaming(backend.name):
                    swept += await backend.sweep()
        except BackendUnavailableError as error:
            if name == only or error.step == STATE_DIRECTORY:
                raise
    return swept


def _names_to_ask(only: str | None) -> tuple[str, ...]:
    return (*_LISTED, *outside_backends()) if only is None or only == "auto" else (only,)


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


# -- what single backends have for the command line -------------------------------------------


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
    """The names of all templates, built or not; none where there is no Linux."""
    if sys.platform != "linux":
        return []
    from .native.template_kinds import PACKAGES

    return list(PACKAGES)


def incus_images(settings: Settings) -> ImageBuilder:
    """The images of the Incus server. ``async with`` it. Raises BackendUnavailableError."""
    from .incus.image_build import ImageBuilder

    return ImageBuilder(settings)
