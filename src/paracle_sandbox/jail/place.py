"""Where a sandbox lives on the machine: its control groups, its subvolume, and what they grant it.

The spawner furnishes it while the child is forked, changes the grant of a child that was made ahead
of need, and removes the place when the child has ended, however far it came. The child only enters
its groups: whatever it did besides would cost each one more of copied memory than it costs the
spawner to do it.
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

    def furnish(
        self, slot: str, shape: Shape, identity: Identity, grant: Grant, steps: Steps
    ) -> None:
        """All of it, but for the child. Raises StepFailed."""
        with steps.step("volume"):
            if self.volume and not shape.tmpfs_mb:
                self.volume.create_subvolume(slot)
                prepare_workspace(f"{VOLUME}/{slot}", shape, identity)
        with steps.step("cgroup"):
            if self.cgroups:
                self.cgroups.create(slot)
        if self.cgroups:
            self.allow(slot, shape, grant, steps)

    def enter(self, slot: str, steps: Steps) -> None:
        """In the child. Raises StepFailed."""
        with steps.step("cgroup attach"):
            if self.cgroups:
                self.cgroups.enter(slot)

    def allow(
        self, slot: str, shape: Shape, grant: Grant, steps: Steps, pid: int | None = None
    ) -> None:
        """Set the limits. Raises StepFailed. ``pid``: its first process, where there is no group
        that all of them are in."""
        with steps.step("limits"):
            if self.cgroups:
                self.cgroups.limit(slot, grant.limits)
            elif pid is not None:
                _limit_process(pid, grant.limits)
        with steps.step("disk limit"):
            if self.volume and not shape.tmpfs_mb:
                self.volume.limit(slot, grant.disk_bytes)

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
