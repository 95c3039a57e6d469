"""Where sandboxes write: a disk of its own for each, with a limit that is not memory.

A pool that keeps quotas gives each sandbox a volume. Other pools (plain folders) cannot; there, on
a server of this machine and as root, the workspace store does. Elsewhere the disk is memory.
"""

from __future__ import annotations

import logging
from urllib.parse import quote

from ...errors import SandboxCreationError
from ...settings import Settings
from ..machine.owner import Owner
from ..machine.workspaces import WorkspaceStore
from .errors import no_pool
from .server import Refused, Server

logger = logging.getLogger(__name__)

_WITH_QUOTAS = ("btrfs", "zfs", "lvm", "lvmcluster", "ceph", "linstor")
_OWNER = "user.paracle.owner"
_SLACK = 1 << 20


class Homes:
    """The writable disks of one backend."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self._server = server
        self._wanted = settings.incus_pool
        self._pool = ""
        self._driver = ""
        self.store = WorkspaceStore(lambda: server.remote.shares_our_files, settings)

    async def pool(self) -> str:
        """Return the pool for everything: that of the settings, else the default profile's, else
        the first. Raises BackendUnavailableError when there is none, or not the wanted one."""
        if not self._pool:
            listed = await self._server.get("/1.0/storage-pools?recursion=1")
            drivers = {str(one["name"]): str(one["driver"]) for one in listed}
            if not drivers or (self._wanted and self._wanted not in drivers):
                raise no_pool(self._wanted or "")
            wanted = self._wanted or await self._profile_pool()
            name = wanted if wanted in drivers else sorted(drivers)[0]
            self._pool, self._driver = name, drivers[name]
        return self._pool

    async def _profile_pool(self) -> str:
        try:
            profile = await self._server.get("/1.0/profiles/default")
        except Refused:
            return ""
        disks = (one for one in (profile.get("devices") or {}).values() if one.get("path") == "/")
        return str(next((disk.get("pool") for disk in disks), "") or "")

    @property
    def has_quotas(self) -> bool:
        return self._driver in _WITH_QUOTAS

    async def why_in_memory(self) -> str:
        """Return why the disks are memory; empty when they are not."""
        if self.has_quotas or await self.store.get() is not None:
            return ""
        return self.store.why_in_memory

    async def make(self, slot: str, disk_mb: int, owner: Owner) -> dict[str, str] | None:
        """Return the device of a new disk; None where it has to be memory."""
        pool = await self.pool()
        if self.has_quotas:
            await self._make_volume(pool, slot, disk_mb, owner)
            return {"pool": pool, "source": _volume(slot)}
        path = await self.store.create(slot, disk_mb)
        return {"source": path} if path else None

    async def _make_volume(self, pool: str, slot: str, disk_mb: int, owner: Owner) -> None:
        body = {
            "name": _volume(slot),
            "type": "custom",
            "content_type": "filesystem",
            "config": {"size": f"{disk_mb}MiB", _OWNER: str(owner)},
        }
        try:
            await self._server.change("POST", f"{_volumes(pool)}", body)
        except Refused as refused:
            raise SandboxCreationError(
                f"The workspace could not be made: {refused.message}", step="workspace"
            ) from refused

    async def usage(self, slot: str, disk_mb: int) -> tuple[int, bool] | None:
        """Return the bytes used, and whether the disk is full; None when that is unknown."""
        if self.has_quotas:
            path = f"{_volumes(await self.pool())}/{quote(_volume(slot))}/state"
            try:
                found = (await self._server.get(path) or {}).get("usage") or {}
            except Refused:
                return None
            # The total is told by some pools only, and then it is less by the filesystem's own.
            used, total = int(found.get("used") or 0), int(found.get("total") or disk_mb << 20)
            return used, used + max(_SLACK, total // 256) >= total
        return await self.store.usage(slot)

    async def remove(self, slot: str) -> str:
        """Remove a disk. Idempotent. Returns what is left, if anything."""
        if self.has_quotas:
            return await self._remove_volume(_volume(slot))
        return await self.store.remove(slot)

    async def _remove_volume(self, name: str) -> str:
        try:
            await self._server.change("DELETE", f"{_volumes(await self.pool())}/{quote(name)}")
        except Refused as refused:
            return "" if refused.is_absence else refused.message
        return ""

    async def sweep(self) -> None:
        """Remove the volumes of dead owners. Folders of the store go with their owner."""
        pool = await self.pool()
        if not self.has_quotas:
            return
        try:
            volumes = await self._server.get(f"{_volumes(pool)}?recursion=1")
        except Refused as refused:
            logger.warning("volumes of dead owners were not looked for: %s", refused.message)
            return
        for volume in volumes:
            owner = Owner.parse(str((volume.get("config") or {}).get(_OWNER, "")))
            if owner is not None and not owner.is_alive and not volume.get("used_by"):
                await self._remove_volume(str(volume["name"]))

    async def close(self) -> None:
        await self.store.close()


def _volume(slot: str) -> str:
    return f"paracle-{slot}"


def _volumes(pool: str) -> str:
    return f"/1.0/storage-pools/{quote(pool)}/volumes/custom"
