"""Where a sandbox lives on the machine: its control groups, its subvolume, and what they grant it.

The spawner makes the groups while the child is forked, changes the grant of a child that was made
ahead of need, and removes the place when the child has ended, however far it came. The child enters
its groups and makes its subvolume, for which older kernels wait for the disk: others must not.
Whatever else it did itself would cost each one copied memory.
"""

from __future__ import annotations

import contextlib
import resource
from typing import NamedTuple

from .cgroups import Cgroups, Limits
from .confine import Identity, Shape, Steps, prepare_workspace
from .root import VOLUME
from .volume import Volume


class Grant(NamedTuple):
    """What one sandbox may use."""

    limits: Limits
    disk_bytes: int

    @classmethod
    def asked(cls, message: dict[str, object]) -> Grant:
        """Of a request to create."""
        return cls(Limits(**message["limits"]), message["disk_bytes"])  # type: ignore[arg-type]


class Place(NamedTuple):
    """What of the machine a spawner has to give: either may be missing."""

    cgroups: Cgroups | None
    volume: Volume | None

    def make_groups(self, slot: str, limits: Limits, steps: Steps) -> None:
        """In the spawner. Raises StepFailed."""
        with steps.step("cgroup"):
            if self.cgroups:
                self.cgroups.create(slot)
        if self.cgroups:
            self._limit(slot, limits, steps, None)

    def enter(
        self, slot: str, shape: Shape, identity: Identity, disk_bytes: int, steps: Steps
    ) -> None:
        """In the child. Raises StepFailed."""
        with steps.step("cgroup attach"):
            if self.cgroups:
                self.cgroups.enter(slot)
        with steps.step("volume"):
            if self.volume and not shape.tmpfs_mb:
                self.volume.create_subvolume(slot)
                prepare_workspace(f"{VOLUME}/{slot}", shape, identity)
        self._limit_disk(slot, shape, disk_bytes, steps)

    def allow(
        self, slot: str, shape: Shape, grant: Grant, steps: Steps, pid: int | None = None
    ) -> None:
        """Set the limits. Raises StepFailed. ``pid``: its first process, where there is no group
        that all of them are in."""
        self._limit(slot, grant.limits, steps, pid)
        self._limit_disk(slot, shape, grant.disk_bytes, steps)

    def _limit(self, slot: str, limits: Limits, steps: Steps, pid: int | None) -> None:
        with steps.step("limits"):
            if self.cgroups:
                self.cgroups.limit(slot, limits)
            elif pid is not None:
                _limit_process(pid, limits)

    def _limit_disk(self, slot: str, shape: Shape, disk_bytes: int, steps: Steps) -> None:
        with steps.step("disk limit"):
            if self.volume and not shape.tmpfs_mb:
                self.volume.limit(slot, disk_bytes)

    def let_die(self, slot: str) -> None:
        """Do not hold up what has been killed."""
        if self.cgroups:
            with contextlib.suppress(OSError):  # its groups were not made yet, or are gone
                self.cgroups.lift_cpu(slot)

    def leave(self, slot: str) -> bool:
        """Remove the groups of a sandbox that has ended; False while they are busy."""
        return self.cgroups is None or self.cgroups.remove(slot)

    def clear(self, slot: str, shape: Shape) -> None:
        """Remove its files. Raises OSError."""
        if self.volume and not shape.tmpfs_mb:
            with contextlib.suppress(FileNotFoundError):  # it was not made yet
                self.volume.delete_subvolume(slot)


def _limit_process(pid: int, limits: Limits) -> None:
    """Without a cgroup: what each process may have, and how many tasks in all."""
    for kind, most in (
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_NPROC, limits.max_processes),
    ):
        resource.prlimit(pid, kind, (most, most))
