"""The native backend: sandboxes out of Linux namespaces, with no daemon and no image.

A spawner process per template (see ``jail/``) makes them; this class only asks it, hands out
the channels, and reads records and cgroups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...channel.drafts import Drafts
from ...channel.socket_channel import SocketChannel
from ...errors import (
    BackendUnavailableError,
    SandboxCleanupError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxNotFoundError,
)
from ...ids import check_sandbox_id
from ...settings import Settings, load_settings
from ...volumes import refuse_volumes
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..cgroup_usage import read_number, read_usage
from . import network_remains
from .interpreter import refuse_hidden
from .launcher import default_python
from .orders import create_request, missing_layers, spawner_options
from .own_directory import require_own_directory
from .records import Record, RecordStore, identified, kill_process
from .spawner import Spawner
from .templates import Template, Templates

if TYPE_CHECKING:
    from ...config import SandboxConfig
    from .cable import Link

_FOREIGN_SECONDS = 15.0
# Almost at the limit is at the limit: what no longer fits may be a whole extent with its metadata.
_DISK_SLACK = 256 << 10
_DISK_SLACK_SHARE = 256


class NativeBackend(Backend):
    """Namespaces, cgroups, seccomp and Landlock of this machine."""

    name = "native"
    kills_guests = True

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings()
        self.records = RecordStore(Path(self.settings.state_dir))
        self.drafts = Drafts(self.settings.state_dir)
        self.templates = Templates(self.settings)
        self._spawners: dict[str, asyncio.Task[Spawner] | Spawner] = {}
        self._owned: dict[str, _Owned] = {}

    async def health(self) -> Health:
        from .health import examine

        # A private instance: no stock, nothing downloaded, and gone with its spawner afterwards.
        probe = NativeBackend(replace(self.settings, template_build=False, stock=0))
        return await examine(probe)

    # -- create and destroy --------------------------------------------------------------

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        require_linux()
        check_sandbox_id(sandbox_id)
        refuse_volumes(config.volumes, self.name)
        refuse_hidden(self.settings.python or default_python(), config.working_dir)
        template = await self.templates.for_image(config.base_image)
        spawner = await self.spawner(template, config)
        self._refuse_missing_limits(spawner, config)
        self._refuse_taken(sandbox_id)
        record = _new_record(sandbox_id, config, labels, template, spawner.posture)
        answer, fds = await spawner.request("create", **create_request(config, spawner.posture))
        if "error" in answer:
            raise _creation_error(answer, sandbox_id)
        record.update({key: answer[key] for key in ("slot", "init", "cgroups")})
        owned = _Owned(spawner, socket.socket(fileno=fds[0]), record)
        try:
            self.records.name(record["slot"], sandbox_id, record)
        except OSError as error:
            await self._end(owned)
            raise _unnamed(error, sandbox_id) from error
        except BaseException:
            await self._end(owned)
            raise
        self._owned[sandbox_id] = owned
        if config.network_mode == "bridge":
            await self._give_network(sandbox_id, owned)

    def _refuse_taken(self, sandbox_id: str) -> None:
        """Before anything is made. Whoever takes the name meanwhile is noticed afterwards."""
        if self.records.is_taken(sandbox_id):
            self.records.sweep()  # it may be a dead one's
            if self.records.is_taken(sandbox_id):
                raise _taken(sandbox_id)

    async def _give_network(self, sandbox_id: str, owned: _Owned) -> None:
        from . import network

        try:
            owned.link = await network.attach(owned.record["init"]["pid"])
        except BaseException:
            await self.destroy(sandbox_id)
            raise

    def _refuse_missing_limits(self, spawner: Spawner, config: SandboxConfig) -> None:
        """As root a limit that cannot be kept is an error, unless it was waived by name."""
        posture = spawner.posture
        if posture["cgroup_version"] or posture["rootless"] or "cgroup" in config.allow_degraded:
            return
        raise BackendUnavailableError(
            f"Limits cannot be kept: {posture['cgroup_note']}. Mount the cgroup file "
            'system, or allow it by name: SandboxConfig(allow_degraded={"cgroup"}).',
            step="cgroup",
        )

    def lacking(self) -> list[str]:
        for spawner in self._spawners.values():
            if isinstance(spawner, Spawner):
                return missing_layers(spawner.posture)
        return []

    async def spawner(self, template: Template, first: SandboxConfig | None = None) -> Spawner:
        """The spawner of a template; callers that come together wait for one start. ``first``:
        the sandbox that it is wanted for, if it is not there yet."""
        known = self._spawners.get(template.name)
        if isinstance(known, Spawner) and known.closed:
            del self._spawners[template.name]
            await known.close()
            self.records.sweep()
            known = None
        if known is None:
            known = asyncio.ensure_future(self._start_spawner(template, first))
            self._spawners[template.name] = known
        if isinstance(known, Spawner):
            return known
        try:
            spawner = await asyncio.shield(known)
        except BaseException:
            if known.done():
                self._spawners.pop(template.name, None)
            raise
        self._spawners[template.name] = spawner
        return spawner

    async def _start_spawner(self, template: Template, first: SandboxConfig | None) -> Spawner:
        settings = self.settings
        require_own_directory(settings.state_dir)
        if not self._swept:
            self._swept = True
            self.records.sweep()
            await self.sweep_drafts()
            with contextlib.suppress(SandboxCleanupError):  # nobody's reason not to start
                await network_remains.sweep()
        self.templates.hold(template)
        options = spawner_options(settings, template, first)
        return await Spawner.start(settings.python or default_python(), options)

    async def connect(self, sandbox_id: str) -> Channel:
        owned = self._owned.get(sandbox_id)
        if owned is None or owned.channel is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        channel, owned.channel = owned.channel, None
        channel.setblocking(False)
        return SocketChannel(channel)

    async def destroy(self, sandbox_id: str) -> None:
        owned = self._owned.pop(sandbox_id, None)
        if owned is None:
            await self._destroy_foreign(sandbox_id)
            return
        left = await self._end(owned)
        left = self._unname(sandbox_id, owned) or left
        if left:
            raise SandboxCleanupError(
                f"Sandbox {sandbox_id} could not be removed: {left}", sandbox_id
            )

    async def _end(self, owned: _Owned) -> str:
        """All of it but its name. Returns what could not be removed."""
        try:
            answer, _ = await owned.spawner.request("destroy", slot=owned.record["slot"])
        except SandboxExecutionError:
            # The spawner died, and everything with it; its records and cgroups are left.
            await owned.spawner.close()
            self.records.sweep()
            return ""
        finally:
            owned.close()
            await network_remains.take([owned.link])
        return str(answer.get("left", ""))

    def _unname(self, sandbox_id: str, owned: _Owned) -> str:
        """Returns what is left: its spawner removes that in the end."""
        try:
            self.records.remove(sandbox_id, owned.record["slot"])
        except OSError as error:
            return f"its record: {error}"
        return ""

    async def _destroy_foreign(self, sandbox_id: str) -> None:
        """One of another process: end it there; its own spawner removes the rest."""
        record = self.records.find(sandbox_id)
        if record is None:
            return
        await asyncio.to_thread(kill_process, record.content.get("init", {}))
        deadline = asyncio.get_running_loop().time() + _FOREIGN_SECONDS
        while self.records.has_slot(record):
            self.records.sweep()
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxCleanupError(f"Sandbox {sandbox_id} is still there", sandbox_id)
            await asyncio.sleep(0.01)
        self.records.remove(sandbox_id, str(record.content.get("slot")))

    def init_pid(self, sandbox_id: str) -> int:
        """The first process of a sandbox of ours, as this machine counts."""
        return int(self._owned[sandbox_id].record["init"]["pid"])

    def cgroups(self, sandbox_id: str) -> dict[str, str]:
        """The control groups of a sandbox of ours; none where there are none."""
        return dict(self._owned[sandbox_id].record["cgroups"])

    # -- look ----------------------------------------------------------------------------

    async def usage(self, sandbox_id: str) -> Usage:
        return await self._usage(sandbox_id, exact=False)

    async def exact_usage(self, sandbox_id: str) -> Usage:
        return await self._usage(sandbox_id, exact=True)

    async def _usage(self, sandbox_id: str, *, exact: bool) -> Usage:
        owned = self._owned.get(sandbox_id)
        record = owned.record if owned else self._record(sandbox_id).content
        disk = owned.read_disk() if owned and not exact else None
        # Asked first: the spawner finds it out while we read the rest.
        asked = owned.ask_disk(exact=exact) if owned and disk is None else None
        try:
            networked = record["config"]["network_mode"] != "none"
            usage = read_usage(record["cgroups"], record["init"]["pid"], networked=networked)
        except (FileNotFoundError, KeyError):
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id) from None
        if owned and asked:
            answer, _ = await asked
            disk, owned.figures = (answer["used"], answer["limit"]), answer.get("figures")
        if disk is None:
            return usage
        used, limit = disk
        slack = max(_DISK_SLACK, limit // _DISK_SLACK_SHARE)
        return replace(usage, disk_bytes=used, disk_full=bool(limit) and used + slack >= limit)

    def _record(self, sandbox_id: str) -> Record:
        record = self.records.find(sandbox_id)
        if record is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        return record

    async def list_sandboxes(self) -> list[SandboxInfo]:
        infos = [_info(record, self.records) for record in self.records.all() if record.is_sandbox]
        # Without a slot but with a living owner: it has just died.
        return [info for info, has_slot in infos if has_slot or not info.owner_alive]

    async def sweep(self) -> int:
        swept = await super().sweep() + await asyncio.to_thread(self.records.sweep)
        await network_remains.sweep()
        return swept

    async def close(self) -> None:
        known = list(self._spawners.values())
        self._spawners.clear()
        starting = [task for task in known if not isinstance(task, Spawner)]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        spawners = [spawner for spawner in known if isinstance(spawner, Spawner)]
        ended = list(self._owned.values())
        for sandbox_id, owned in self._owned.items():
            owned.close()
            self._unname(sandbox_id, owned)
        self._owned.clear()
        await asyncio.gather(*(spawner.close() for spawner in spawners))
        self.templates.release()
        await network_remains.take(owned.link for owned in ended)


class _Owned:
    """What this process holds of a sandbox it made."""

    def __init__(self, spawner: Spawner, channel: socket.socket, record: dict[str, Any]) -> None:
        self.spawner = spawner
        self.channel: socket.socket | None = channel
        self.record = record
        self.link: Link | None = None
        # The files with what its disk holds and may hold, once the spawner has told them.
        self.figures: tuple[list[str], str] | None = None

    def read_disk(self) -> tuple[int, int] | None:
        """None when the spawner has to be asked, who would have to wake up for it."""
        if self.figures is None:
            return None
        used, limit = self.figures
        try:
            return sum(map(read_number, used)), read_number(limit)
        except FileNotFoundError:
            return None

    def ask_disk(self, *, exact: bool) -> asyncio.Future[tuple[dict[str, Any], list[int]]]:
        return self.spawner.ask("disk", slot=self.record["slot"], exact=exact)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def require_linux() -> None:
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"Native sandboxes need Linux, and this is {sys.platform}. Use Docker "
            "(SANDBOX_MODE=docker) or a remote service (SANDBOX_MODE=remote)."
        )


def _new_record(
    sandbox_id: str,
    config: SandboxConfig,
    labels: Mapping[str, str],
    template: Template,
    posture: Mapping[str, Any],
) -> dict[str, Any]:
    shown = ("cpu_cores", "memory_mb", "disk_mb", "network_mode", "base_image")
    return {
        "id": sandbox_id,
        "state": "running",
        "instance": posture["instance"],
        "token": posture["token"],
        "owner": identified(os.getpid()),
        "template": template.name,
        "labels": dict(labels),
        "config": {name: getattr(config, name) for name in shown},
        "created_at": time.time(),
    }


def _taken(sandbox_id: str) -> SandboxConflictError:
    return SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)


def _unnamed(error: OSError, sandbox_id: str) -> SandboxError:
    if isinstance(error, FileExistsError):
        return _taken(sandbox_id)
    return SandboxCreationError(
        f"The record of the sandbox cannot be written: {error}. It was removed again. Make room in "
        "the directory that PARACLE_STATE_DIR names.",
        sandbox_id,
        step="record",
    )


def _creation_error(answer: Mapping[str, Any], sandbox_id: str) -> SandboxCreationError:
    return SandboxCreationError(
        f"The sandbox could not be made: {answer['message']}. Nothing was started. "
        "`paracle sandbox health` shows what this machine lacks.",
        sandbox_id,
        step=str(answer["error"]),
    )


def _info(record: Record, records: RecordStore) -> tuple[SandboxInfo, bool]:
    """What is known of it, and whether there is a child behind it."""
    content = record.content
    alive = records.is_alive(record)
    info = SandboxInfo(
        sandbox_id=record.sandbox_id,
        backend="native",
        state=str(content.get("state")) if alive else "lost",
        owner_pid=int(content.get("owner", {}).get("pid", 0)),
        owner_alive=alive,
        created_at=float(content.get("created_at", 0.0)),
        config=content.get("config", {}),
        labels=content.get("labels", {}),
    )
    return info, records.has_slot(record)
