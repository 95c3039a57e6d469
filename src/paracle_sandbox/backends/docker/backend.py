"""The docker backend: a container for each sandbox, with the guest as its main process.

    create ── attach ── start ── boot message ...      one connection for the sandbox's life
    the connection ends: stdin ends: the guest ends: the engine removes the container

So what an owner leaves behind when it is killed removes itself, without anybody's help. What it
had not started yet carries its name on a label, and the next start of anybody removes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...channel.boot import boot_message
from ...config import SandboxConfig
from ...errors import (
    BackendUnavailableError,
    SandboxCleanupError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxNotFoundError,
)
from ...ids import check_sandbox_id
from ...owner import Owner
from ...settings import Settings, load_settings
from ...volumes import Volume, allowed_volumes
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..cgroup_usage import read_usage
from .channel import AttachChannel
from .engine import Engine, EngineRefused
from .images import Images, not_found
from .labels import BACKEND, MANAGED, container_name, labels_of, sandbox_info
from .spec import Place, container_body, guest_setup
from .usage import cgroups_of, usage_of
from .watch import Watch
from .workspaces import Workspaces

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

logger = logging.getLogger(__name__)

_DEATH_SECONDS = 3.0


@dataclass
class _Owned:
    """What this process holds of a container it made."""

    container: str
    config: SandboxConfig
    channel: AttachChannel | None = None
    pid: int = 0
    cgroups: dict[str, str] = field(default_factory=dict)
    last: Usage = field(default_factory=Usage)


class DockerBackend(Backend):
    """Containers of a Docker or Podman engine. ``runtime`` is any OCI runtime that it has."""

    name = "docker"
    # Text that runs before the guest does, and what to add to the limit of processes.
    _probe = ""
    _pids_headroom = 0
    limits_processes = True

    def __init__(self, settings: Settings | None = None, runtime: str | None = None) -> None:
        self.settings = settings or load_settings()
        self.runtime = runtime or self.settings.docker_runtime
        self.engine = Engine(self.settings)
        self.session = secrets.token_hex(8)
        self._images = Images(self.engine, self.settings.state_dir)
        self._watch = Watch(self.engine, self.session)
        self._owned: dict[str, _Owned] = {}
        self._workspaces: asyncio.Task[Workspaces | None] | None = None
        self.why_in_memory = ""
        self._bridged = False
        self._swept = False

    @property
    def client(self) -> Docker:
        """The engine's client, for what is not ours to do."""
        return self.engine.client()

    def container_of(self, sandbox_id: str) -> DockerContainer | None:
        owned = self._owned.get(sandbox_id)
        return self.engine.container(owned.container) if owned else None

    def init_pid(self, sandbox_id: str) -> int:
        """The first process of a sandbox of ours that was looked at, as its machine counts."""
        return self._owned[sandbox_id].pid

    async def health(self) -> Health:
        from .health import examine

        return await examine(type(self)(self.settings, self.runtime))

    # -- create ---------------------------------------------------------------------------

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        check_sandbox_id(sandbox_id)
        volumes = self._allowed(config)
        await self._sweep_once()
        making = asyncio.ensure_future(self._make(sandbox_id, config, labels, volumes))
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            # It is made to its end, and then removed: the engine cannot be stopped half way.
            await asyncio.wait([making])
            if making.cancelled() or making.exception() is None:
                await self.destroy(sandbox_id)
            raise

    async def _make(
        self,
        sandbox_id: str,
        config: SandboxConfig,
        labels: Mapping[str, str],
        volumes: list[Volume],
    ) -> None:
        async with self._network(config) as network:
            await self._make_in(network, sandbox_id, config, labels, volumes)

    async def _make_in(
        self,
        network: str,
        sandbox_id: str,
        config: SandboxConfig,
        labels: Mapping[str, str],
        volumes: list[Volume],
    ) -> None:
        workspaces = await self.workspaces()
        home = await workspaces.create(sandbox_id, config.disk_mb) if workspaces else None
        try:
            owner = Owner.of(os.getpid())
            place = Place(
                home=home,
                network=network,
                runtime=self.runtime,
                probe=self._probe,
                pids_headroom=self._pids_headroom,
                volumes=volumes,
                labels=labels_of(sandbox_id, self.name, self.session, owner, config, labels),
            )
            container = await self._create_container(sandbox_id, config, place)
        except BaseException:
            if workspaces and sandbox_id not in self._owned:
                await workspaces.remove(sandbox_id)
            raise
        owned = self._owned[sandbox_id] = _Owned(container, config)
        try:
            await self._start(sandbox_id, owned)
        except BaseException:
            with suppress(SandboxError):  # why it did not start matters more
                await self.destroy(sandbox_id)
            raise

    async def _create_container(self, sandbox_id: str, config: SandboxConfig, place: Place) -> str:
        body = container_body(config, place)
        for attempt in (1, 2, 3):
            try:
                return await self.engine.create(container_name(sandbox_id), body)
            except EngineRefused as refused:
                if refused.status == 404 and "image" in refused.message.lower() and attempt < 3:
                    await self._images.fetch(config.base_image)
                elif refused.status == 409 and attempt < 3 and await self.sweep():
                    continue  # the name was a dead one's
                else:
                    raise _creation_error(refused, sandbox_id, config) from refused
        raise not_found(config.base_image, "it was pulled, but is not here")

    async def _start(self, sandbox_id: str, owned: _Owned) -> None:
        self._watch.begin(owned.container)
        try:
            owned.channel = await self.engine.attach(owned.container)
            await self.engine.start(owned.container)
            await self._look_inside(sandbox_id, owned)
            await owned.channel.send(boot_message(guest_setup(owned.config)))
        except EngineRefused as refused:
            raise _creation_error(refused, sandbox_id, owned.config) from refused
        except ConnectionError as error:
            raise SandboxCreationError(
                f"The container ended before its guest was there: {error}", sandbox_id, step="guest"
            ) from error

    async def _look_inside(self, sandbox_id: str, owned: _Owned) -> None:
        """Before anything else happens in it: is it what was asked for? (See gvisor.)"""

    def _allowed(self, config: SandboxConfig) -> list[Volume]:
        volumes = allowed_volumes(config.volumes, self.settings.volumes)
        if volumes and self.engine.endpoint.socket_path is None:
            raise SandboxCreationError(
                f"Volumes are paths of the engine's machine, and {self.engine.endpoint} is "
                "elsewhere. Copy files in with copy_to().",
                step="volumes",
            )
        return volumes

    @asynccontextmanager
    async def _network(self, config: SandboxConfig) -> AsyncIterator[str]:
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

        self._bridged = True
        async with bridge(self.engine, config) as network:
            yield network

    async def workspaces(self) -> Workspaces | None:
        """The store of this process, started once; None where there can be none."""
        task = self._workspaces
        if task is not None and task.done() and not task.cancelled() and not task.exception():
            store = task.result()
            if store is not None and store.ended:
                await store.close()
                task = None
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._workspaces = asyncio.ensure_future(self._open_workspaces())
        return await asyncio.shield(task)

    async def _open_workspaces(self) -> Workspaces | None:
        if not await asyncio.to_thread(lambda: self.engine.endpoint.shares_our_files):
            self.why_in_memory = "the engine is not of this machine, or we are not root"
            return None
        try:
            return await Workspaces.open(self.settings)
        except BackendUnavailableError as error:
            self.why_in_memory = str(error)
            return None

    # -- connect, destroy -----------------------------------------------------------------

    async def connect(self, sandbox_id: str) -> Channel:
        owned = self._owned.get(sandbox_id)
        if owned is None or owned.channel is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        channel, owned.channel = owned.channel, None
        return channel

    async def destroy(self, sandbox_id: str) -> None:
        owned = self._owned.get(sandbox_id)
        reference = owned.container if owned else await self._find(sandbox_id)
        if reference is None:
            return
        if owned is not None and owned.channel is not None:
            await owned.channel.close()
        try:
            await self.engine.remove(reference)
        except EngineRefused as refused:
            raise SandboxCleanupError(
                f"Sandbox {sandbox_id} could not be removed: {refused.message}", sandbox_id
            ) from refused
        if owned is None:
            return
        self._watch.end(owned.container)
        self._owned.pop(sandbox_id, None)
        workspaces = await self.workspaces() if self._workspaces else None
        left = await workspaces.remove(sandbox_id) if workspaces else ""
        if left:
            raise SandboxCleanupError(f"Sandbox {sandbox_id} left files: {left}", sandbox_id)

    async def _find(self, sandbox_id: str) -> str | None:
        """A container of ours that another process made."""
        for container in await self._containers():
            info = sandbox_info(container)
            if info is not None and info.sandbox_id == sandbox_id:
                return str(container["Id"])
        return None

    # -- look -----------------------------------------------------------------------------

    async def usage(self, sandbox_id: str) -> Usage:
        owned = self._owned.get(sandbox_id)
        if owned is None:
            return await self._foreign_usage(sandbox_id)
        usage = await self._measure(owned)
        if usage is None:
            usage = await self._last_usage(owned)
        workspaces = await self.workspaces()
        if workspaces is not None:
            used, full = await workspaces.usage(sandbox_id)
            usage = replace(usage, disk_bytes=used, disk_full=full)
        owned.last = usage
        return usage

    async def _measure(self, owned: _Owned) -> Usage | None:
        """None when it has ended."""
        if not owned.pid:
            state = await self._state(owned.container)
            if not state.get("Pid"):
                return None
            owned.pid = int(state["Pid"])
            owned.cgroups = cgroups_of(owned.pid, owned.container)
        try:
            if owned.cgroups:
                return read_usage(owned.cgroups, owned.pid)
            return usage_of(await self.engine.stats(owned.container))
        except (FileNotFoundError, EngineRefused):
            return None

    async def _last_usage(self, owned: _Owned) -> Usage:
        """Of one that has ended: what was seen last, and whether memory was the cause."""
        death = await self._watch.cause(owned.container, _DEATH_SECONDS)
        limit = owned.config.memory_mb << 20
        if not death.oom:
            return replace(owned.last, processes=0)
        return replace(
            owned.last, processes=0, memory_peak_bytes=limit, oom_kills=owned.last.oom_kills + 1
        )

    async def _foreign_usage(self, sandbox_id: str) -> Usage:
        reference = await self._find(sandbox_id)
        state = await self._state(reference) if reference else {}
        usage = None
        if reference and state.get("Pid"):
            pid = int(state["Pid"])
            place = _Owned(reference, SandboxConfig(), pid=pid, cgroups=cgroups_of(pid, reference))
            usage = await self._measure(place)
        if usage is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        return usage

    async def _state(self, reference: str) -> dict[str, Any]:
        try:
            return dict((await self.engine.inspect(reference))["State"])
        except EngineRefused:
            return {}

    async def list_sandboxes(self) -> list[SandboxInfo]:
        infos = [sandbox_info(container) for container in await self._containers()]
        return [info for info in infos if info is not None]

    async def _containers(self) -> list[dict[str, Any]]:
        found = await self.engine.containers(f"{MANAGED}=true", f"{BACKEND}={self.name}")
        return [container for container in found if container.get("State") != "removing"]

    async def sweep(self) -> int:
        swept = 0
        for container in await self._containers():
            info = sandbox_info(container)
            if info is None or info.owner_alive:
                continue
            try:
                await self.engine.remove(str(container["Id"]))
                swept += 1
            except EngineRefused as refused:
                logger.warning("sandbox %s was not swept: %s", info.sandbox_id, refused.message)
        return swept

    async def _sweep_once(self) -> None:
        if not self._swept:
            self._swept = True
            try:
                await self.sweep()
            except BaseException:
                self._swept = False
                raise

    async def close(self) -> None:
        for sandbox_id in list(self._owned):
            try:
                await self.destroy(sandbox_id)
            except SandboxError as error:
                # Its connection ends with us, and so does it.
                logger.warning("sandbox %s was not removed: %s", sandbox_id, error)
        if self._bridged:
            from .network import remove_unused

            await remove_unused(self.engine)
        await self._watch.close()
        task, self._workspaces = self._workspaces, None
        if task is not None:
            with suppress(SandboxError, asyncio.CancelledError):
                store = await task
                if store is not None:
                    await store.close()
        await self.engine.close()


def _creation_error(
    refused: EngineRefused, sandbox_id: str, config: SandboxConfig
) -> SandboxCreationError:
    text = refused.message
    lowered = text.lower()
    if refused.status == 409 and "name" in lowered:
        return SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)
    if "python3" in text and "not found" in lowered:
        return SandboxCreationError(
            f"The image {config.base_image} has no python3, which the guest needs. Add it to the "
            "image, or choose another base_image.",
            sandbox_id,
            step="guest",
        )
    if "unknown or invalid runtime" in lowered or "unknown runtime" in lowered:
        return BackendUnavailableError(
            f"The engine does not know the runtime: {text}. Register it (runtimes in its "
            "daemon.json), and restart it.",
            sandbox_id,
            step="runtime",
        )
    return SandboxCreationError(
        f"The engine did not make the sandbox: {text}", sandbox_id, step="container"
    )
