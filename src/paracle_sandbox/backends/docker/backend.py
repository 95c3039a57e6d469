"""The docker backend: a container for each sandbox, with the guest as its main process.

    create ── attach ── start ── boot message ...      one connection for the sandbox's life
    the connection ends: stdin ends: the guest ends: the engine removes the container

So when an owner is killed, its containers remove themselves. A container that it had not started
yet has the owner's name on a label, and the next start of any owner removes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...channel.bootstrap import boot_message
from ...config import SandboxConfig
from ...errors import (
    SandboxCleanupError,
    SandboxCreationError,
    SandboxError,
    SandboxNotFoundError,
)
from ...ids import check_sandbox_id
from ...settings import Settings, load_settings
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..machine.drafts import Drafts
from ..machine.owner import Owner
from ..machine.volumes import Volume
from ..machine.workspaces import Remains, WorkspaceStore
from .attach_channel import AttachChannel
from .engine import Engine, EngineRefused
from .engine_differences import network_for, process_limit_for, seccomp_for, volumes_for
from .errors import is_name_taken, translating_refusals
from .events import Watch
from .image_files import ImageFiles, unpack
from .images import Images
from .labels import (
    BACKEND,
    MANAGED,
    Title,
    labels_of,
    owner_of,
    sandbox_info,
    sandbox_title,
)
from .spec import (
    Place,
    container_body,
    guest_setup,
    image_volumes,
    volume_names,
    writable_places,
)
from .usage import Meter, Metered, Space

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

logger = logging.getLogger(__name__)

_END_SECONDS = 0.3


@dataclass
class Owned(Metered):
    """This process's state of a container that it made. ``space`` is set where the workspace is
    not on a volume of ours."""

    workspace: str = ""
    channel: AttachChannel | None = None
    space: Space | None = None

    async def hang_up(self) -> None:
        """Close the connections. A channel that somebody took is closed by its taker."""
        for end in (self.channel, self.space):
            if end is not None:
                await end.close()


class DockerBackend(Backend):
    """Containers of a Docker or Podman engine. ``runtime`` is any OCI runtime that the engine
    has."""

    name = "docker"
    _probe = ""
    has_own_kernel = False
    counts_from_handover = True

    def __init__(self, settings: Settings | None = None, runtime: str | None = None) -> None:
        self.settings = settings or load_settings()
        self.runtime = runtime or self.settings.docker_runtime
        self.engine = Engine(self.settings)
        self.session = secrets.token_hex(8)
        self.drafts = Drafts(self.settings.state_dir)
        self._images = Images(self.engine, self.settings.state_dir, self.settings.docker_registry)
        self._files = ImageFiles(self.engine, self.settings.state_dir, self.name, self.session)
        self._watch = Watch(self.engine, self.session)
        self._meter = Meter(self.engine, self._watch)
        self._owned: dict[str, Owned] = {}
        self.store = WorkspaceStore(lambda: self.engine.endpoint.shares_our_files, self.settings)
        self._remains = Remains(self.store.remove)
        self._bridged = False

    @property
    def client(self) -> Docker:
        """The engine's client, for callers that need more than this backend offers."""
        return self.engine.client()

    def container_of(self, sandbox_id: str) -> DockerContainer | None:
        owned = self._owned.get(sandbox_id)
        return self.engine.container(owned.container) if owned else None

    def init_pid(self, sandbox_id: str) -> int:
        """Return the pid of a sandbox's first process, as its machine counts. It must be a sandbox
        of ours whose usage was measured."""
        return self._owned[sandbox_id].pid

    def cgroups(self, sandbox_id: str) -> dict[str, str]:
        """Return the cgroups of a sandbox of ours whose usage was measured; empty when they are not
        on this machine."""
        return self._owned[sandbox_id].cgroups

    async def health(self) -> Health:
        from .health import examine

        return await examine(type(self)(self.settings, self.runtime))

    # -- create ---------------------------------------------------------------------------

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        check_sandbox_id(sandbox_id)
        volumes = volumes_for(self.engine, config, self.settings)
        await self.sweep_once()
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
        self._bridged |= config.network_mode == "bridge"
        async with network_for(self.engine, config) as network:
            await self._make_in(network, sandbox_id, config, labels, volumes)
        if volumes:
            await self._check_again(sandbox_id, config, volumes)

    async def _check_again(
        self, sandbox_id: str, config: SandboxConfig, volumes: list[Volume]
    ) -> None:
        """Check the volumes again after the engine got their paths: what is there now must be what
        was allowed."""
        try:
            now = volumes_for(self.engine, config, self.settings)
            if now != volumes:
                raise SandboxCreationError(
                    "A volume was replaced while the sandbox was made.", sandbox_id, step="volumes"
                )
        except SandboxError:
            await self.destroy(sandbox_id)
            raise

    async def _make_in(
        self,
        network: str,
        sandbox_id: str,
        config: SandboxConfig,
        labels: Mapping[str, str],
        volumes: list[Volume],
    ) -> None:
        title = sandbox_title(sandbox_id)
        with translating_refusals(sandbox_id, config):
            image = await self._images.ensure(config.base_image)
            volumes_inside = image_volumes(image, config)
            files = await self._files.of(image, config, volumes_inside)
        slot = secrets.token_hex(8)
        try:
            home = await self.store.create(slot, config.disk_mb, volume_names(volumes_inside))
            owner = Owner.of(os.getpid())
            place = Place(
                home=home,
                network=network,
                seccomp=seccomp_for(self.engine),
                runtime=self.runtime,
                probe=self._probe,
                own_kernel=self.has_own_kernel,
                process_limit=process_limit_for(self.engine),
                volumes=volumes,
                image_volumes=volumes_inside,
                labels=labels_of(title, self.name, self.session, owner, config, labels),
            )
            container = await self._create_container(sandbox_id, title, config, place)
        except BaseException:
            self._remains.add(sandbox_id, slot)
            await self._remains.try_to_remove(sandbox_id)
            raise
        owned = self._owned[sandbox_id] = Owned(container, config, workspace=slot)
        if home is None:
            places = writable_places(config, volumes_inside)
            owned.space = Space(self.engine, container, list(places))
        try:
            await self._start(sandbox_id, owned)
            await unpack(self.engine, container, files)
            if config.network_mode == "bridge":
                from .network import isolate

                await isolate(self.engine, config)
            await self._meter.start_counting(owned)
        except BaseException:
            with suppress(SandboxError):  # why it did not start matters more
                await self.destroy(sandbox_id)
            raise

    async def _create_container(
        self, sandbox_id: str, title: Title, config: SandboxConfig, place: Place
    ) -> str:
        body = container_body(config, place)
        with translating_refusals(sandbox_id, config):
            try:
                return await self.engine.create(title.name, body)
            except EngineRefused as refused:
                if not is_name_taken(refused) or not await self.sweep():
                    raise
            return await self.engine.create(title.name, body)  # the name was a dead one's

    async def _start(self, sandbox_id: str, owned: Owned) -> None:
        self._watch.begin(owned.container)
        try:
            with translating_refusals(sandbox_id, owned.config):
                owned.channel = await self.engine.attach(owned.container)
                await self._boot(sandbox_id, owned, owned.channel)
        except ConnectionError as error:
            raise SandboxCreationError(
                f"The container ended before its guest was there: {error}", sandbox_id, step="guest"
            ) from error

    async def _boot(self, sandbox_id: str, owned: Owned, channel: AttachChannel) -> None:
        """Start the container. The boot message is sent meanwhile."""
        sending = asyncio.ensure_future(channel.send(boot_message(guest_setup(owned.config))))
        try:
            await self.engine.start(owned.container)
            await sending
        finally:
            sending.cancel()
            await asyncio.wait([sending])

    # -- connect, destroy -----------------------------------------------------------------

    async def connect(self, sandbox_id: str) -> Channel:
        owned = self._owned.get(sandbox_id)
        if owned is None or owned.channel is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        channel, owned.channel = owned.channel, None
        return channel

    async def destroy(self, sandbox_id: str) -> None:
        await self._remove_container(sandbox_id)
        await self._remains.remove(sandbox_id)

    async def _remove_container(self, sandbox_id: str) -> None:
        owned = self._owned.get(sandbox_id)
        reference = owned.container if owned else await self._find(sandbox_id)
        if reference is None:
            return
        if owned is not None:
            await owned.hang_up()
        try:
            # Its connection has ended, so it is about to go.
            if owned is None or not await self.engine.is_removed(reference, _END_SECONDS):
                await self.engine.remove(reference)
        except EngineRefused as refused:
            raise SandboxCleanupError(
                f"Sandbox {sandbox_id} could not be removed: {refused.message}", sandbox_id
            ) from refused
        if owned is None:
            return
        self._watch.end(owned.container)
        self._owned.pop(sandbox_id, None)
        self._remains.add(sandbox_id, owned.workspace)

    async def _find(self, sandbox_id: str) -> str | None:
        """Find a container of ours that another process made."""
        for container in await self._containers():
            info = sandbox_info(container)
            if info is not None and info.sandbox_id == sandbox_id:
                return str(container["Id"])
        return None

    # -- look -----------------------------------------------------------------------------

    async def usage(self, sandbox_id: str) -> Usage:
        owned = self._owned.get(sandbox_id)
        if owned is None:
            reference = await self._find(sandbox_id)
            usage = await self._meter.measure_foreign(reference) if reference else None
            if usage is None:
                raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
            return usage
        usage = await self._meter.measure(owned)
        if disk := await self._disk(owned):
            usage = replace(usage, disk_bytes=disk[0], disk_full=disk[1])
        owned.last = usage
        return usage

    async def _disk(self, owned: Owned) -> tuple[int, bool] | None:
        if owned.space is not None:
            return await owned.space.look()
        return await self.store.usage(owned.workspace)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        infos = [sandbox_info(container) for container in await self._containers()]
        return [info for info in infos if info is not None]

    async def _containers(self) -> list[dict[str, Any]]:
        found = await self.engine.containers(f"{MANAGED}=true", f"{BACKEND}={self.name}")
        return [container for container in found if container.get("State") != "removing"]

    async def sweep(self) -> int:
        swept = await super().sweep()
        for container in await self._containers():
            owner = owner_of(container)
            if owner is None or owner.is_alive:
                continue
            try:
                await self.engine.remove(str(container["Id"]))
                swept += sandbox_info(container) is not None
            except EngineRefused as refused:
                logger.warning("container %s was not swept: %s", container["Id"], refused.message)
        await self._remains.try_to_remove()
        return swept

    async def close(self) -> None:
        for sandbox_id in list(self._owned):
            try:
                await self.destroy(sandbox_id)
            except SandboxError as error:
                # Its connection ends with us, and so does it.
                logger.warning("sandbox %s was not removed: %s", sandbox_id, error)
        await self._remains.try_to_remove()
        if self._bridged:
            from .network import remove_unused

            await remove_unused(self.engine)
        await self._watch.close()
        await self.store.close()
        await self.engine.close()
