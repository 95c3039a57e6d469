"""The native backend: sandboxes out of Linux namespaces, with no daemon and no image.

A spawner process per template (see ``jail/``) makes them; this class only asks it, hands out
the channels, and reads records and cgroups.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...channel.socket import SocketChannel
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
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..machine.cgroup_usage import MemoryPeak, read_cpu, read_number, read_usage
from ..machine.drafts import Drafts
from ..machine.volumes import refuse_volumes
from .descriptors import SpareDescriptors, is_shortage, no_descriptor
from .interpreter import refuse_hidden, version_of
from .obstacles import look
from .process_usage import ProcessLooks, init_cpu
from .records import (
    Record,
    RecordStore,
    fits,
    identified,
    kill_init,
    require_own_directory,
)
from .spawner_client import Spawner
from .spawner_process import default_python
from .spawner_protocol import create_request, missing_layers, spawner_options
from .table_mark import may_be_there
from .template_kinds import require_trusted_template
from .templates import Template, Templates, template_name

if TYPE_CHECKING:
    from ...config import SandboxConfig
    from .veth import Link

log = logging.getLogger(__name__)

_FOREIGN_SECONDS = 15.0
# A spawner that had no room for a volume is replaced when there is so much.
_ROOM_SECONDS = 60.0
_ROOM_BYTES = 512 << 20
# Almost at the limit is at the limit: what no longer fits may be a whole extent with its metadata.
_DISK_SLACK = 256 << 10
_DISK_SLACK_SHARE = 256
# Steps that fail where a container, a filter or a profile takes rights away.
_NEED_RIGHTS = ("namespaces", "loopback", "hostname", "private mounts", "workspace", "devices",
                "proc", "identity", "capabilities")  # fmt: skip


class NativeBackend(Backend):
    """Namespaces, cgroups, seccomp and Landlock of this machine."""

    name = "native"
    kills_guests = True
    counts_from_handover = True

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or load_settings()
        self.records = RecordStore(Path(self.settings.state_dir))
        self.drafts = Drafts(self.settings.state_dir)
        self.templates = Templates(self.settings)
        self._spawners: dict[str, asyncio.Task[Spawner] | Spawner] = {}
        self._retired: list[Spawner] = []
        self._look_for_room_at = 0.0
        self._owned: dict[str, _Owned] = {}
        self._spare = SpareDescriptors()
        self._knows_python = False

    async def health(self) -> Health:
        from .health import examine

        # A private instance: no stock, nothing downloaded, and gone with its spawner afterwards.
        probe = NativeBackend(replace(self.settings, template_build=False, stock=0))
        return await examine(probe)

    # -- create and destroy --------------------------------------------------------------

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        check_sandbox_id(sandbox_id)
        if not fits(labels):
            raise SandboxCreationError(
                "The labels are too long: together they may have 80,000 characters.", sandbox_id
            )
        refuse_volumes(config.volumes, self.name)
        python = self.settings.python or default_python()
        if not self._knows_python:
            if self.settings.python is not None:  # it is run to learn that
                await asyncio.to_thread(version_of, python)
            self._knows_python = True
        refuse_hidden(python, config.working_dir)
        try:
            await self._create(sandbox_id, config, labels)
        except OSError as error:
            if not is_shortage(error):
                raise
            raise no_descriptor(sandbox_id) from error

    async def _create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        template = await self.templates.for_image(config.base_image, self.on_progress)
        spawner, answer, fds = await self._ask_for_child(sandbox_id, template, config)
        if "slot" not in answer:
            raise await self._creation_error(answer, sandbox_id)
        record = _new_record(sandbox_id, config, labels, template, spawner.posture)
        record.update({key: answer[key] for key in ("slot", "init", "cgroups")})
        record["cpu_before"] = _cpu_of(record)
        owned = _Owned(spawner, socket.socket(fileno=fds[0]) if fds else None, record)
        try:
            if not fds:  # the kernel could not give us the channel
                raise no_descriptor(sandbox_id)
            self.records.name(record["slot"], sandbox_id, record)
        except OSError as error:
            await self._end(owned)
            raise _unnamed(error, sandbox_id) from error
        except BaseException:
            await self._end(owned)
            raise
        owned.incomplete = None if template.is_built else template.name
        self._owned[sandbox_id] = owned
        if config.network_mode == "bridge":
            await self._give_network(sandbox_id, owned)

    async def _creation_error(
        self, answer: Mapping[str, Any], sandbox_id: str
    ) -> SandboxCreationError:
        """Add all that stands in the way, where it is for lack of rights."""
        step = str(answer["error"])
        said = [f"The sandbox could not be made: {answer['message']}. Nothing was started."]
        if step in _NEED_RIGHTS:
            python = self.settings.python or default_python()
            said += await asyncio.to_thread(look, python)
        elif step == "record":
            said.append("Make room in the directory that PARACLE_STATE_DIR names, or name another.")
        return SandboxCreationError(" ".join(filter(None, said)), sandbox_id, step=step)

    async def _ask_for_child(
        self, sandbox_id: str, template: Template, config: SandboxConfig
    ) -> tuple[Spawner, dict[str, Any], list[int]]:
        """The spawner, its answer and the descriptors that came with it. A spawner whose volume was
        given up by the kernel, as when the host's disk is full, is retired, and another asked."""
        spawner = await self.spawner(template, config)
        await self._refuse_missing_limits(spawner, config)
        await self._refuse_taken(sandbox_id)
        answer, fds = await spawner.request("create", **create_request(config, spawner.posture))
        if answer.get("retire"):
            await self._retire(template.name, spawner)
            spawner = await self.spawner(template, config)
            answer, fds = await spawner.request("create", **create_request(config, spawner.posture))
        return spawner, answer, fds

    async def _retire(self, name: str, spawner: Spawner) -> None:
        """It gets no more sandboxes, and ends with the last that it has."""
        if self._spawners.get(name) is spawner:
            log.warning("A native spawner is replaced: its volume is lost, or was never to be had.")
            del self._spawners[name]
            self._retired.append(spawner)
        await self._close_retired()

    async def _close_retired(self) -> None:
        used = {id(owned.spawner) for owned in self._owned.values()}
        for spawner in list(self._retired):
            if id(spawner) not in used and spawner.is_idle:
                self._retired.remove(spawner)
                await spawner.close()

    def _can_have_more(self, spawner: Spawner) -> bool:
        """Whether the disk was full when it started, and is no more. Looked up once a minute."""
        if not spawner.posture.get("lacks_room") or time.monotonic() < self._look_for_room_at:
            return False
        self._look_for_room_at = time.monotonic() + _ROOM_SECONDS
        try:
            disk = os.statvfs(self.settings.data_dir)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize > _ROOM_BYTES

    async def _refuse_taken(self, sandbox_id: str) -> None:
        """Before anything is made. Whoever takes the name meanwhile is noticed afterwards."""
        if self.records.is_taken(sandbox_id):
            await self._sweep_records()  # it may be a dead one's
            if self.records.is_taken(sandbox_id):
                raise _taken(sandbox_id)

    async def _give_network(self, sandbox_id: str, owned: _Owned) -> None:
        from . import network

        try:
            owned.link = await network.attach(owned.record["init"])
        except BaseException:
            await self.destroy(sandbox_id)
            raise

    async def _refuse_missing_limits(self, spawner: Spawner, config: SandboxConfig) -> None:
        """As root a limit that cannot be kept is an error, unless it was waived by name."""
        posture = spawner.posture
        if posture["cgroup_version"] or posture["rootless"]:
            return
        if self.settings.waives("cgroup", config):
            return
        python = self.settings.python or default_python()
        reasons, remedy = await asyncio.to_thread(look, python)
        said = (
            f"Limits cannot be kept: {posture['cgroup_note']}.",
            reasons,
            remedy or "Mount the cgroup file system, writable.",
            "Or do without these limits by name: --allow-degraded cgroup, in Python "
            'SandboxConfig(allow_degraded={"cgroup"}).',
        )
        raise BackendUnavailableError(" ".join(filter(None, said)), step="cgroup")

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
            await self._sweep_records()
            known = self._spawners.get(template.name)  # somebody else may have been quicker
        if isinstance(known, Spawner) and self._can_have_more(known):
            await self._retire(template.name, known)
            known = self._spawners.get(template.name)
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
            await self._sweep_records()
            await self.sweep_drafts()
            with contextlib.suppress(SandboxCleanupError):  # nobody's reason not to start
                await _sweep_networks()
        if template.path is not None:
            require_trusted_template(str(template.path))
        self.templates.hold(template)
        self._spare.keep()
        options = spawner_options(settings, template, first)
        return await Spawner.start(settings.python or default_python(), options)

    async def connect(self, sandbox_id: str) -> Channel:
        owned = self._owned.get(sandbox_id)
        if owned is None or owned.channel is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        channel, owned.channel = owned.channel, None
        channel.setblocking(False)
        return SocketChannel(channel)

    def begin_preparing(self, image: str) -> None:
        with contextlib.suppress(SandboxError):
            self.templates.begin(template_name(image))

    async def wait_for_packages(self, sandbox_id: str, source: str | bytes) -> None:
        owned = self._owned.get(sandbox_id)
        if owned is None or owned.incomplete is None:
            return
        await self.templates.wait_for(owned.incomplete, source, self.on_progress)
        if self.templates.get(owned.incomplete).is_built:
            owned.incomplete = None

    async def destroy(self, sandbox_id: str) -> None:
        owned = self._owned.get(sandbox_id)
        if owned is None:
            await self._destroy_foreign(sandbox_id)
            return
        left = await self._end(owned)
        if left:  # it is not forgotten, and says so: another call tries again
            with contextlib.suppress(OSError, BackendUnavailableError):
                self.records.mark(sandbox_id, {**owned.record, "state": "removing"})
        else:
            left = self._unname(sandbox_id, owned)
        if not left and self._owned.get(sandbox_id) is owned:
            del self._owned[sandbox_id]
            await self._close_retired()
        if left:
            raise SandboxCleanupError(
                f"Sandbox {sandbox_id} could not be removed: {left}", sandbox_id
            )

    async def _end(self, owned: _Owned) -> str:
        """Remove all of it but its name. Returns what could not be removed."""
        try:
            answer, _ = await owned.spawner.request("destroy", slot=owned.record["slot"])
        except SandboxExecutionError:
            # The spawner died, and everything with it; its records and cgroups are left.
            await owned.spawner.close()
            await self._sweep_records()
            return ""
        finally:
            owned.close()
            await _detach_links([owned.link])
        return str(answer.get("left", ""))

    def _unname(self, sandbox_id: str, owned: _Owned) -> str:
        """Returns what is left: its spawner removes that in the end."""
        slot = owned.record["slot"]
        try:
            try:
                self.records.remove(sandbox_id, slot)
            except OSError as error:
                if not is_shortage(error):
                    raise
                with self._spare.given_up():
                    self.records.remove(sandbox_id, slot)
        except (OSError, BackendUnavailableError) as error:
            return f"its record: {error}"
        return ""

    async def _destroy_foreign(self, sandbox_id: str) -> None:
        """One of another process: end it there; its own spawner removes the rest."""
        record = self.records.find(sandbox_id)
        if record is None:
            return
        await asyncio.to_thread(kill_init, record.content)
        deadline = asyncio.get_running_loop().time() + _FOREIGN_SECONDS
        while self.records.has_slot(record):
            await self._sweep_records()
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
            usage = await _figures(record, owned.looks if owned else ProcessLooks())
            if owned:
                usage = owned.peak.of(usage)
                owned.peak.begin_anew(record["cgroups"])
            else:  # another process's: it knows more
                usage = MemoryPeak().of(usage)
        except (FileNotFoundError, KeyError):
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id) from None
        if owned and asked:
            answer, _ = await asked
            if "used" in answer:  # else the spawner could not look it up just now
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
        return await asyncio.to_thread(self._list)  # a thousand take a tenth of a second

    def _list(self) -> list[SandboxInfo]:
        infos = [_info(record, self.records) for record in self.records.all() if record.is_sandbox]
        # Without a slot but with a living owner: it has just died.
        return [info for info, has_slot in infos if has_slot or not info.owner_alive]

    async def sweep(self) -> int:
        swept = await super().sweep() + await self._sweep_records()
        await _sweep_networks()
        return swept

    async def _sweep_records(self) -> int:
        """Sweep in a thread, because that waits for the end of what it kills."""
        return await asyncio.to_thread(self.records.sweep) if self.records.has_any() else 0

    async def close(self) -> None:
        known = list(self._spawners.values())
        self._spawners.clear()
        starting = [task for task in known if not isinstance(task, Spawner)]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        spawners = [spawner for spawner in known if isinstance(spawner, Spawner)] + self._retired
        self._retired = []
        ended = list(self._owned.values())
        for sandbox_id, owned in self._owned.items():
            owned.close()
            self._unname(sandbox_id, owned)
        self._owned.clear()
        await asyncio.gather(*(spawner.close() for spawner in spawners))
        self._spare.give_up()
        self.templates.release()
        await _detach_links(owned.link for owned in ended)


class _Owned:
    """The part of a sandbox that this process holds: it made it."""

    def __init__(
        self, spawner: Spawner, channel: socket.socket | None, record: dict[str, Any]
    ) -> None:
        self.spawner = spawner
        self.channel = channel
        self.record = record
        self.link: Link | None = None
        # The template, while its packages are being installed.
        self.incomplete: str | None = None
        self.looks = ProcessLooks()
        self.peak = MemoryPeak()
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


async def _figures(record: Mapping[str, Any], looks: ProcessLooks) -> Usage:
    """Raises FileNotFoundError or KeyError when the sandbox is gone."""
    mode, pid = str(record["config"]["network_mode"]), record["init"]["pid"]
    if record["cgroups"]:
        usage = read_usage(record["cgroups"], pid, network_mode=mode)
    else:
        usage = await looks.usage(pid, network_mode=mode)
    before = record.get("cpu_before", 0.0)
    return replace(usage, cpu_seconds=max(0.0, usage.cpu_seconds - before))


def _cpu_of(record: Mapping[str, Any]) -> float:
    """The CPU time of making a sandbox, and of its time in the pool: nothing of its programs."""
    try:
        groups = record["cgroups"]
        return read_cpu(groups) if groups else init_cpu(record["init"]["pid"])
    except FileNotFoundError:  # it has ended already: whoever uses it will hear of it
        return 0.0


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
        "labels": {str(key): str(value) for key, value in labels.items()},
        "config": {name: getattr(config, name) for name in shown},
        "created_at": time.time(),
    }


def _taken(sandbox_id: str) -> SandboxConflictError:
    return SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)


def _unnamed(error: OSError, sandbox_id: str) -> SandboxError:
    if isinstance(error, FileExistsError):
        return _taken(sandbox_id)
    if is_shortage(error):
        return no_descriptor(sandbox_id)
    return SandboxCreationError(
        f"The record of the sandbox cannot be written: {error}. It was removed again. Make room in "
        "the directory that PARACLE_STATE_DIR names.",
        sandbox_id,
        step="record",
    )


async def _detach_links(links: Iterable[Link | None]) -> None:
    """Remove the links of ended sandboxes now, which would go with their namespaces a little later,
    and the firewall rules with the last of them. Most sandboxes have no network, and must not pay
    for its imports."""
    there = [link for link in links if link is not None]
    if there:
        from . import network

        await network.detach(*there)


async def _sweep_networks() -> None:
    """Remove the firewall rules that a killed owner left. Records do not tell of them: its spawner
    may have removed those. Raises SandboxCleanupError."""
    if may_be_there():
        from . import network

        await network.sweep()


def _info(record: Record, records: RecordStore) -> tuple[SandboxInfo, bool]:
    """Describe it, and say whether there is a child behind it."""
    content = record.content
    alive = records.is_alive(record)
    info = SandboxInfo(
        sandbox_id=record.sandbox_id,
        backend="native",
        state=str(content.get("state")) if alive else "lost",
        owner_pid=content.get("owner", {}).get("pid", 0),
        owner_alive=alive,
        created_at=float(content.get("created_at", 0.0)),
        config=content.get("config", {}),
        labels=content.get("labels", {}),
    )
    return info, records.has_slot(record)
