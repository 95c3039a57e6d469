"""The incus backend: an instance for each sandbox, with the guest over one exec stream.

    make (or take a ready one) ── start ── exec ── boot message ...   one stream for its life
    the stream ends: the guest ends: its porter ends the instance: the server removes it

So when an owner is killed, its instances remove themselves. An instance that it had not started yet
has the owner's name in a key, and the next start of any owner removes it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...channel.bootstrap import boot_message
from ...config import SandboxConfig
from ...errors import (
    SandboxCleanupError,
    SandboxConflictError,
    SandboxError,
    SandboxNotFoundError,
)
from ...ids import check_sandbox_id
from ...settings import Settings, load_settings
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..machine.drafts import Drafts
from ..machine.owner import Owner
from ..machine.volumes import refuse_volumes
from ..machine.workspaces import Remains
from .errors import creation_error, guest_error
from .exec_channel import ExecChannel
from .images import image_source
from .instances import Instances, Maker
from .labels import instance_name, owner_keys, owner_of, sandbox_info, sandbox_keys
from .remotes import Remotes
from .server import LateStreams, Refused, Server
from .spec import (
    CONTAINER,
    OWN_PROCESSES,
    Place,
    confinement,
    exec_body,
    guest_setup,
    instance_body,
)
from .storage import Homes
from .usage import Meter, Metered, guest_pid
from .warm_pool import WarmPool

logger = logging.getLogger(__name__)

_PATIENCE = 2


@dataclass
class Owned(Metered):
    """This process's state of a sandbox that it made. connect() gives the channel away."""

    channel: ExecChannel | None = None


class IncusBackend(Backend):
    """Containers of an Incus server."""

    name = "incus"
    kind = CONTAINER
    counts_from_handover = True

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings()
        self.remotes = Remotes(self.settings)
        self.server = Server(self.remotes.get(self.settings.incus_remote))
        self.session = secrets.token_hex(8)
        self.drafts = Drafts(self.settings.state_dir)
        self.instances = Instances(self.server)
        self.maker = Maker(self.instances)
        self.homes = Homes(self.server, self.settings)
        self._remains = Remains(self.homes.remove)
        self.warm_pool = WarmPool(self.settings.incus_warm, self._make_ready, self.instances.remove)
        # Without a reference to this backend, which nobody may have any more.
        self._at_exit = partial(_end_unclosed, os.getpid(), self.settings, self.warm_pool.names)
        beside = OWN_PROCESSES if self.kind == CONTAINER else 0
        self._meter = Meter(self.instances, self.homes, beside)
        self._owned: dict[str, Owned] = {}
        self._creating: set[str] = set()
        self._remembers = False

    async def health(self) -> Health:
        from .health import examine

        # One that is closed afterwards, and keeps nothing ready.
        return await examine(type(self)(replace(self.settings, incus_warm=0)))

    # -- create ---------------------------------------------------------------------------

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        check_sandbox_id(sandbox_id)
        refuse_volumes(config.volumes, self.name)
        if sandbox_id in self._owned or sandbox_id in self._creating:
            raise SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)
        self._creating.add(sandbox_id)
        making = asyncio.ensure_future(self._make(sandbox_id, config, labels))
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            # It is made to its end, and then removed: the server cannot be stopped half way.
            await asyncio.wait([making])
            if making.cancelled() or making.exception() is None:
                await self.destroy(sandbox_id)
            raise
        finally:
            self._creating.discard(sandbox_id)

    async def _make(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        try:
            await self._check_machine()
            await self.sweep_once()
            source = await image_source(self.server, self.remotes, config.base_image)
            place = await self._place(config, sandbox_keys(sandbox_id, config, labels))
            await self._make_in(place, sandbox_id, config, source)
        except Refused as refused:
            raise creation_error(refused, sandbox_id, config.base_image) from refused
        if not self._remembers:
            self._remembers = True
            atexit.register(self._at_exit)
        self.warm_pool.refill(source)

    async def _check_machine(self) -> None:
        """Raise an error if this server cannot have such instances at all."""

    async def _place(self, config: SandboxConfig, keys: Mapping[str, str]) -> Place:
        from .network import nic_for

        return Place(
            kind=self.kind,
            pool=await self.homes.pool(),
            nic=await nic_for(self.server, config),
            keys={**self._owner_keys(), **keys},
        )

    def _owner_keys(self) -> dict[str, str]:
        return owner_keys(self.name, self.session, Owner.of(os.getpid()))

    async def _make_in(
        self, place: Place, sandbox_id: str, config: SandboxConfig, source: Mapping[str, Any]
    ) -> None:
        slot = secrets.token_hex(8)
        name = instance_name(sandbox_id)
        try:
            home = await self.homes.make(slot, config.disk_mb, Owner.of(os.getpid()))
            place = replace(place, home=home)
            await self.maker.make(sandbox_id, place, config, source, self.warm_pool.take(source))
        except BaseException:
            self._remains.add(sandbox_id, slot)
            await self._remains.try_to_remove(sandbox_id)
            raise
        owned = self._owned[sandbox_id] = Owned(name, config, slot)
        try:
            await self.instances.start(name)
            owned.channel = await self._boot(owned, place)
            await self._meter.start_counting(owned)
        except BaseException:
            with suppress(SandboxError):  # why it did not start matters more
                await self.destroy(sandbox_id)
            raise

    async def _make_ready(self, name: str, keys: dict[str, str], source: Mapping[str, Any]) -> None:
        place = Place(self.kind, await self.homes.pool(), keys={**self._owner_keys(), **keys})
        await self.maker.make_stopped(instance_body(name, source, place))

    async def _boot(self, owned: Owned, place: Place) -> ExecChannel:
        message = boot_message(guest_setup(owned.config), confinement(owned.config, place))
        for _ in range(_PATIENCE):
            # Nothing was run: this machine is so busy that the server gave us up.
            with suppress(LateStreams):
                return await self._send_guest(owned, message)
        return await self._send_guest(owned, message)

    async def _send_guest(self, owned: Owned, message: bytes) -> ExecChannel:
        channel = await self._attach(owned.instance)
        try:
            # One that cannot take it says why on its stderr.
            with suppress(ConnectionError):
                await channel.send(message)
            if not await channel.ready():
                words = await channel.last_words() or await self.server.why_ended(channel.operation)
                raise guest_error(words, owned.config.base_image)
        except BaseException:
            await channel.close()
            raise
        return channel

    async def _attach(self, instance: str) -> ExecChannel:
        return await self.server.execute(instance, exec_body())

    # -- connect, destroy -----------------------------------------------------------------

    async def connect(self, sandbox_id: str) -> Channel:
        owned = self._owned.get(sandbox_id)
        if owned is None or owned.channel is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        channel, owned.channel = owned.channel, None
        return channel

    async def destroy(self, sandbox_id: str) -> None:
        await self._remove_instance(sandbox_id)
        await self._remains.remove(sandbox_id)

    async def _remove_instance(self, sandbox_id: str) -> None:
        owned = self._owned.get(sandbox_id)
        name = owned.instance if owned else await self._find(sandbox_id)
        if name is None:
            return
        if owned is not None and owned.channel is not None:
            await owned.channel.close()
        try:
            await self.instances.remove(name)
        except Refused as refused:
            raise SandboxCleanupError(
                f"Sandbox {sandbox_id} could not be removed: {refused.message}", sandbox_id
            ) from refused
        if owned is None:
            return
        self._owned.pop(sandbox_id, None)
        self._remains.add(sandbox_id, owned.slot)

    async def _find(self, sandbox_id: str) -> str | None:
        """Find an instance of ours that another process made."""
        try:
            found = await self.instances.find(instance_name(sandbox_id))
        except Refused as refused:
            raise SandboxError(f"The Incus server refused: {refused.message}") from refused
        if found is None or sandbox_info(found, self.name) is None:
            return None
        return instance_name(sandbox_id)

    # -- look -----------------------------------------------------------------------------

    async def usage(self, sandbox_id: str) -> Usage:
        owned = self._owned.get(sandbox_id)
        if owned is not None:
            return await self._meter.measure(owned)
        name = await self._find(sandbox_id)
        usage = await self._meter.measure_foreign(name) if name else None
        if usage is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        return usage

    def init_pid(self, sandbox_id: str) -> int:
        """Return the pid of a sandbox's first process, as its machine counts. It must be a sandbox
        of ours whose usage was measured."""
        return guest_pid(self._owned[sandbox_id].cgroups)

    async def list_sandboxes(self) -> list[SandboxInfo]:
        infos = [sandbox_info(instance, self.name) for instance in await self.instances.all()]
        return [info for info in infos if info is not None]

    async def sweep(self) -> int:
        swept = await super().sweep()
        for instance in await self.instances.all():
            owner = owner_of(instance, self.name)
            if owner is None or owner.is_alive:
                continue
            try:
                await self.instances.remove(str(instance["name"]))
                swept += sandbox_info(instance, self.name) is not None
            except Refused as refused:
                logger.warning("instance %s was not swept: %s", instance["name"], refused.message)
        await self._remains.try_to_remove()
        await self.homes.sweep()
        return swept

    async def close(self) -> None:
        await self.warm_pool.close()
        for sandbox_id in list(self._owned):
            try:
                await self.destroy(sandbox_id)
            except SandboxError as error:
                # Its stream ends with us, and so does it.
                logger.warning("sandbox %s: %s", sandbox_id, error)
        await self._remains.try_to_remove()
        await self.homes.close()
        await self.server.close()
        atexit.unregister(self._at_exit)
        self._remembers = False


def _end_unclosed(pid: int, settings: Settings, names: set[str]) -> None:
    """Remove ready instances at the end of a process that did not close its backend. Unlike
    sandboxes, stopped instances do not end by themselves."""
    if not names or os.getpid() != pid:
        return

    async def remove() -> None:
        server = Server(Remotes(settings).get(settings.incus_remote))
        try:
            for name in sorted(names):
                await Instances(server).remove_begun(name)
        finally:
            await server.close()

    try:
        asyncio.run(remove())
    except (Refused, SandboxError, OSError, RuntimeError) as error:
        logger.warning("an instance that was kept ready stays until the next start: %s", error)
