"""The docker backend: a container for each sandbox, with the guest as its main process.

    create ── attach ── start ── boot message ...      one connection for the sandbox's life
    the connection ends: stdin ends: the guest ends: the engine removes the container

So what an owner leaves behind when it is killed removes itself, without anybody's help. What it
had not started yet carries its name on a label, and the next start of anybody removes it.
What is likely to be wanted next can be kept ready: see ``ready.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
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
from ..machine.remains import Remains
from ..machine.volumes import Volume
from ..machine.workspaces import WorkspaceStore
from .attach_channel import AttachChannel
from .engine import Engine, EngineRefused
from .engine_differences import network_for, process_limit_for, seccomp_for, volumes_for
from .errors import is_name_taken, told
from .events import Watch
from .image_files import ImageFiles, unpack
from .images import Images
from .labels import (
    BACKEND,
    MANAGED,
    Title,
    container_name,
    labels_of,
    owner_of,
    ready_title,
    sandbox_info,
    sandbox_title,
)
from .meter import Meter
from .owned import Owned
from .ready import Stock, Wish
from .space import Space
from .spec import (
    Place,
    container_body,
    guest_setup,
    image_volumes,
    volume_names,
    writable_places,
)

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

logger = logging.getLogger(__name__)

_END_SECONDS = 0.3


class DockerBackend(Backend):
    """Containers of a Docker or Podman engine. ``runtime`` is any OCI runtime that it has."""

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
        self._living: set[str] = set()
        self._most = 0  # at a time
        self.stock = Stock(self.settings.docker_warm, self._make_ready, self.destroy)
        self.store = WorkspaceStore(lambda: self.engine.endpoint.shares_our_files, self.settings)
        self._remains = Remains(self.store.remove)
        self._bridged = False

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

    def cgroups(self, sandbox_id: str) -> dict[str, str]:
        """Of one that was looked at; none when they are not on this machine."""
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
        wish = Wish(config, labels)
        is_new = sandbox_id not in self._living
        self._living.add(sandbox_id)
        self._bridged |= config.network_mode == "bridge"
        self._most = max(self._most, len(self._living))
        try:
            if not await self._take_ready(sandbox_id, wish):
                self.stock.shrink(self._most - len(self._living))
                async with network_for(self.engine, config) as network:
                    await self._make_in(network, sandbox_title(sandbox_id), wish, volumes)
                if volumes:
                    await self._check_again(sandbox_id, config, volumes)
        except BaseException:
            if is_new:
                self._living.discard(sandbox_id)
            raise
        self.stock.note(wish)

    async def _check_again(
        self, sandbox_id: str, config: SandboxConfig, volumes: list[Volume]
    ) -> None:
        """The engine was given paths: what is there now must be what was allowed."""
        try:
            now = volumes_for(self.engine, config, self.settings)
            if now != volumes:
                raise SandboxCreationError(
                    "A volume was replaced while the sandbox was made.", sandbox_id, step="volumes"
                )
        except SandboxError:
            await self.destroy(sandbox_id)
            raise

    async def _take_ready(self, sandbox_id: str, wish: Wish) -> bool:
        """Give a ready container the name of a sandbox. Not if it has died, or its image is no
        longer the one of that name, or the name is another's: a new one is made then, and whoever
        asks for it hears what is wrong."""
        handle = await self.stock.take(wish)
        owned = self._owned.get(handle) if handle else None
        if handle is None or owned is None:
            return False
        rename = self.engine.rename(owned.container, container_name(sandbox_id))
        image, renamed, lives = await asyncio.gather(
            self.engine.image_id(wish.config.base_image),
            rename,
            self._meter.sees_alive(owned),
            return_exceptions=True,
        )
        if image != owned.image or renamed is not None or lives is not True:
            logger.info("a container that was kept ready is not used: %s", renamed or image)
            with suppress(SandboxError):
                await self.destroy(handle)
            return False
        self._owned[sandbox_id] = self._owned.pop(handle)
        owned.created_at = time.time()
        await self._meter.hand_over(owned)
        return True

    async def _make_ready(self, wish: Wish) -> str:
        title = ready_title(secrets.token_hex(8))
        try:
            async with network_for(self.engine, wish.config) as network:
                await self._make_in(network, title, wish, [])
        except BaseException as error:
            with suppress(SandboxError):
                await self.destroy(title.handle)
            if isinstance(error, asyncio.CancelledError):
                # The event loop ends, and nobody closed us; see Watch.
                await self.engine.close()
            raise
        return title.handle

    async def _make_in(self, network: str, title: Title, wish: Wish, volumes: list[Volume]) -> None:
        config = wish.config
        with told(title.handle, config):
            image = await self._images.known(config.base_image)
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
                labels=labels_of(title, self.name, self.session, owner, config, wish.labels),
            )
            container = await self._create_container(title, config, place)
        except BaseException:
            self._remains.add(title.handle, slot)
            await self._remains.try_to_remove(title.handle)
            raise
        owned = self._owned[title.handle] = Owned(container, config, slot, wish.labels)
        if home is None:
            places = writable_places(config, volumes_inside)
            owned.space = Space(self.engine, container, list(places))
        try:
            await self._start(title.handle, owned)
            await unpack(self.engine, container, files)
            if config.network_mode == "bridge":
                from .network import isolate

                await isolate(self.engine, config)
            await self._meter.hand_over(owned)
        except BaseException:
            with suppress(SandboxError):  # why it did not start matters more
                await self.destroy(title.handle)
            raise

    async def _create_container(self, title: Title, config: SandboxConfig, place: Place) -> str:
        body = container_body(config, place)
        with told(title.handle, config):
            try:
                return await self.engine.create(title.name, body)
            except EngineRefused as refused:
                if not is_name_taken(refused) or not await self.sweep():
                    raise
            return await self.engine.create(title.name, body)  # the name was a dead one's

    async def _start(self, sandbox_id: str, owned: Owned) -> None:
        self._watch.begin(owned.container)
        try:
            with told(sandbox_id, owned.config):
                owned.channel = await self.engine.attach(owned.container)
                await self._boot(sandbox_id, owned, owned.channel)
        except ConnectionError as error:
            raise SandboxCreationError(
                f"The container ended before its guest was there: {error}", sandbox_id, step="guest"
            ) from error

    async def _boot(self, sandbox_id: str, owned: Owned, channel: AttachChannel) -> None:
        """The guest is on its way while the engine starts the container."""
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
        self._make_room(sandbox_id, owned)

    def _make_room(self, sandbox_id: str, owned: Owned) -> None:
        """What was a sandbox has gone: something may be made ready in its place. Not while it goes,
        which would be one more than there may be, and would slow down both."""
        if sandbox_id in self._living:
            self._living.discard(sandbox_id)
            self.stock.refill(Wish(owned.config, owned.labels), self._most - len(self._living))

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
            reference = await self._find(sandbox_id)
            usage = await self._meter.of_foreign(reference) if reference else None
            if usage is None:
                raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
            return usage
        usage = await self._meter.of(owned)
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
        return [self._dated(info) for info in infos if info is not None]

    def _dated(self, info: SandboxInfo) -> SandboxInfo:
        """Of our own it is known when they were made, also if they were kept ready before."""
        owned = self._owned.get(info.sandbox_id)
        return replace(info, created_at=owned.created_at) if owned else info

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
        self._living.clear()  # nothing is made ready any more
        await self.stock.close()
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
