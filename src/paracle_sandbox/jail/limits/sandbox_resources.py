"""The resources of one sandbox on this machine: control groups, subvolume, and their limits.

The spawner makes the groups while the child is forked, changes the grant of a child that was made
ahead of need, and removes the place when the child has ended, however far it came. The child enters
its groups and makes its subvolume, for which older kernels wait for the disk: others must not.
Whatever else it did itself would cost each one copied memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import NamedTuple

from ..root import VOLUME
from ..shape import Identity, Shape, prepare_workspace
from ..steps import Steps
from .cgroups import Cgroups, Limits
from .volume import Volume


class Grant(NamedTuple):
    """The limits of one sandbox."""

    limits: Limits
    disk_bytes: int

    @classmethod
    def asked(cls, message: dict[str, object]) -> Grant:
        """Read the limits from a request to create a sandbox."""
        return cls(Limits(**message["limits"]), message["disk_bytes"])  # type: ignore[arg-type]


class Process(NamedTuple):
    """The first one of a sandbox, where there is no group that all of them are in."""

    pid: int
    identity: Identity


class Place(NamedTuple):
    """The resources that a spawner has to give: either may be missing.

    ``is_born_in_group``: the first process of a sandbox is forked into its group (`jail.clone`)."""

    cgroups: Cgroups | None
    volume: Volume | None
    is_born_in_group: bool = False

    def make_groups(self, slot: str, limits: Limits, steps: Steps) -> None:
        """Make and limit the groups. The spawner calls it. Raises StepFailed."""
        with steps.step("cgroup"):
            if self.cgroups:
                self.cgroups.create(slot)
        if self.cgroups:
            self._limit(slot, limits, steps, None)

    def enter(
        self, slot: str, shape: Shape, identity: Identity, disk_bytes: int, steps: Steps
    ) -> None:
        """Enter the groups and make the subvolume. The child calls it. Raises StepFailed."""
        with steps.step("cgroup attach"):
            if self.cgroups and not self.is_born_in_group:
                self.cgroups.enter(slot)
        with steps.step("volume"):
            if self.volume and not shape.tmpfs_mb:
                self.volume.create_subvolume(slot)
                prepare_workspace(f"{VOLUME}/{slot}", shape, identity)
        self._limit_disk(slot, shape, disk_bytes, steps)

    def allow(self, slot: str, shape: Shape, grant: Grant, steps: Steps, process: Process) -> None:
        """Set new limits. Raises StepFailed."""
        self._limit(slot, grant.limits, steps, process)
        self._limit_disk(slot, shape, grant.disk_bytes, steps)

    def _limit(self, slot: str, limits: Limits, steps: Steps, process: Process | None) -> None:
        with steps.step("limits"):
            if self.cgroups:
                self.cgroups.limit(slot, limits)
            elif process is not None:
                _limit_process(process, limits)

    def _limit_disk(self, slot: str, shape: Shape, disk_bytes: int, steps: Steps) -> None:
        with steps.step("disk limit"):
            if self.volume and not shape.tmpfs_mb:
                self.volume.limit(slot, disk_bytes)

    @property
    def broken(self) -> bool:
        """Whether no sandbox can be made here any more: another spawner has to be started."""
        return self.volume is not None and self.volume.broken

    def let_die(self, slot: str) -> None:
        """Do not hold up what has been killed."""
        if self.cgroups:
            with contextlib.suppress(OSError):  # its groups were not made yet, or are gone
                self.cgroups.lift_cpu(slot)

    def leave(self, slot: str) -> bool:
        """Remove the groups of a sandbox that has ended; False while they are busy."""
        return self.cgroups is None or self.cgroups.remove(slot)

    def clear(self, slot: str, shape: Shape) -> None:
        """Remove its files. Raises OSError. Those on a broken volume go with the volume."""
        if self.volume and not shape.tmpfs_mb and not self.volume.broken:
            with contextlib.suppress(FileNotFoundError):  # it was not made yet
                self.volume.delete_subvolume(slot)


def _limit_process(process: Process, limits: Limits) -> None:
    """Where there is no cgroup, limit each process, and the number of tasks in all."""
    with _real_ids(process.identity):
        for kind, most in (
            (resource.RLIMIT_DATA, limits.memory_bytes),
            (resource.RLIMIT_NPROC, limits.max_processes),
        ):
            _, hard = resource.prlimit(process.pid, kind)
            try:
                resource.prlimit(process.pid, kind, (most, most))
            except PermissionError:  # only some may raise it, and what it is may be enough
                least = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.prlimit(process.pid, kind, (least, least))


@contextlib.contextmanager
def _real_ids(identity: Identity) -> Iterator[None]:
    """Have these for a moment. Without CAP_SYS_RESOURCE, which root of a container lacks, a limit
    can only be set for a process with one's own real ids. The effective ones, and with them all
    capabilities, stay."""
    uid, gid = os.getuid(), os.getgid()
    os.setresgid(identity.gid, -1, -1)
    try:
        os.setresuid(identity.uid, -1, -1)
        try:
            yield
        finally:
            os.setresuid(uid, -1, -1)
    finally:
        os.setresgid(gid, -1, -1)
