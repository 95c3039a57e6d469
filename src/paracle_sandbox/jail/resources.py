"""The resources that all sandboxes of one spawner share: instance, root, volume and cgroups."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from typing import Any

from ..host.own_directory import open_own_directory
from . import root
from .child import Child
from .clone import can_clone_into
from .limits.cgroups import Cgroups, CgroupsUnavailable
from .limits.sandbox_resources import Place
from .limits.shared_space import Space
from .limits.volume import MINIMUM_BYTES, Volume, VolumeUnavailable
from .records import Records
from .shape import UID_INSIDE, Identity
from .uids import UidBlock


class Resources:
    """Built once, in order; every later operation works on descriptors opened here."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._rootless: bool = options["rootless"]
        self.records = Records(options["state_dir"])
        self.instance = self.records.instance
        self._space: Space | None = None
        self._lacks_room = False
        self._uids = None if self._rootless else UidBlock(options["uid_base"])
        self._root = os.path.join(options["state_dir"], f"root-{self.instance}")
        self._state = open_own_directory(options["state_dir"])
        self.cgroups, self.cgroup_note = self._find_cgroups()
        is_born_in_group = self.cgroups is not None and can_clone_into(self.cgroups)
        self._host_proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.own_network, self.capabilities = -1, 0
        if not self._rootless:
            flags = os.O_RDONLY | os.O_CLOEXEC
            self.own_network = os.open("self/ns/net", flags, dir_fd=self._host_proc)
            permitted = self._read("self/status").partition("\nCapPrm:")[2]
            self.capabilities = int(permitted.split("\n", 1)[0], 16)
        try:
            self._build(options)
        except BaseException:
            self.close()
            raise
        self.place = Place(self.cgroups, self.volume, is_born_in_group)

    def _build(self, options: dict[str, Any]) -> None:
        os.makedirs(self._root, 0o700, exist_ok=True)
        root.build(self._root, options["template_dir"], rootless=self._rootless)
        self.volume, self.volume_note = self._make_volume(options["data_dir"])
        root.enter(self._root)  # and that of the zygote, which shares the mount namespace

    def _find_cgroups(self) -> tuple[Cgroups | None, str]:
        try:
            return Cgroups.find(f"{self.records.place}-{self.instance}"), ""
        except CgroupsUnavailable as error:
            return None, str(error)
        except OSError as error:
            return None, f"cgroups cannot be used: {error}"

    def _make_volume(self, data_dir: str) -> tuple[Volume | None, str]:
        if self._rootless:
            return None, "workspaces are in memory: a disk volume needs root"
        try:
            os.makedirs(data_dir, 0o711, exist_ok=True)
            self._space = Space(data_dir)
            if self._space.size_bytes < MINIMUM_BYTES:
                raise OSError(errno.ENOSPC, f"the disk of {data_dir} is full")
            volume = Volume.create(data_dir, self._space.size_bytes, self._root + root.VOLUME)
            self._space.enter(volume.identity)
            return volume, ""
        except VolumeUnavailable as error:
            note = f"workspaces are in memory: {error}"
        except OSError as error:
            self._lacks_room = error.errno in (errno.ENOSPC, errno.EIO)
            note = f"workspaces are in memory: no volume ({error})"
        self._give_space_back()
        return None, note

    def _give_space_back(self) -> None:
        space, self._space = self._space, None
        if space is not None:
            space.close()

    def posture(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "token": self.records.token,
            "rootless": self._rootless,
            "cgroup_version": self.cgroups.version if self.cgroups else 0,
            "cgroup_note": self.cgroup_note,
            "volume": self.volume is not None,
            "volume_note": self.volume_note,
            "lacks_room": self._lacks_room,
        }

    def take_identity(self) -> Identity:
        if self._rootless:
            return Identity(UID_INSIDE, UID_INSIDE, True)
        assert self._uids is not None
        number = self._uids.take()
        return Identity(number, number, False)

    def give_identity_back(self, identity: Identity) -> None:
        if self._uids is not None:
            self._uids.give_back(identity.uid)

    def cgroup_paths(self, slot: str) -> dict[str, str]:
        if self.cgroups is None:
            return {}
        return {kind: f"{path}/{slot}" for kind, path in self.cgroups.paths.items()}

    def process_of(self, pidfd: int) -> dict[str, int]:
        """The pid and start time of a process as the owner's namespace sees it. Raises OSError."""
        pid = self._pid_of(pidfd)
        fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
        self._pid_of(pidfd)  # if it has ended meanwhile, the number may be another's
        return {"pid": pid, "start": int(fields[19])}

    def _pid_of(self, pidfd: int) -> int:
        pid = int(self._read(f"self/fdinfo/{pidfd}").split("\nPid:")[1].split()[0])
        if pid <= 0:
            raise ProcessLookupError(errno.ESRCH, "the child died")
        return pid

    def _read(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._host_proc)
        try:
            return os.read(fd, 4096).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def disk_answer(self, child: Child | None, exact: bool) -> dict[str, Any]:
        """Tell what is used and allowed, and where to look it up without asking. ``exact``: not
        with what was removed a moment ago."""
        if exact and self.volume:
            with contextlib.suppress(OSError):  # a broken volume: its figures are all there is
                self.volume.commit()
        if child is not None and self.volume and not child.shape.tmpfs_mb:
            used, limit = self.volume.usage(child.slot)
            return {"used": used, "limit": limit, "figures": self.volume.figures(child.slot)}
        used, limit = _tmpfs_usage(child) if child is not None else (0, 0)
        return {"used": used, "limit": limit}

    def close(self, keep: Collection[str] = ()) -> None:
        """Remove what is ours. The records of the children in ``keep``, of which something is
        left, stay for the next sweep."""
        self._give_space_back()
        if self.cgroups:
            self.cgroups.close()
        with contextlib.suppress(OSError):
            os.rmdir(os.path.basename(self._root), dir_fd=self._state)
        if self._uids is not None:
            self._uids.close()
        self.records.close(keep)


def _tmpfs_usage(child: Child) -> tuple[int, int]:
    if child.disk_fd < 0:
        return 0, 0
    stat = os.fstatvfs(child.disk_fd)
    size = stat.f_blocks * stat.f_frsize
    if not stat.f_ffree:  # full, whatever of it is left
        return size, size
    return size - stat.f_bfree * stat.f_frsize, size
