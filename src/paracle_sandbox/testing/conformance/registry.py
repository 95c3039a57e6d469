"""What a check is, and the features that some of them need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .case import Case

Body = Callable[[Case], Awaitable[None]]

# A backend has a feature where it keeps what is said here; the checks prove that it does.
FEATURES = {
    "root": "an own file system, whose system part is read-only",
    "identity": "an own user (paracle, uid 1000), host name and environment",
    "processes": "own processes: nobody sees or signals those of others",
    "network": 'no network but the loopback with network_mode="none"',
    "images": "a base_image that must be there",
    "usage": "measured figures of CPU, memory, disk and processes",
    "memory": "memory_mb holds for all processes together, and running into it is told",
    "cpu": "cpu_cores holds for all processes together",
    "pids": "max_processes holds",
    "pids_told": "running into max_processes is told",
    "disk": "disk_mb holds, and running into it is told",
    "disk_apart": "disk_mb does not count against memory_mb",
}


@dataclass(frozen=True)
class Check:
    """One clause of the contract. ``quick`` ones together take a few seconds."""

    name: str
    body: Body
    quick: bool
    needs: frozenset[str]

    @property
    def description(self) -> str:
        return (self.body.__doc__ or self.name).strip()

    def missing(self, features: frozenset[str]) -> list[str]:
        """The features it needs and does not find."""
        return sorted(self.needs - features)


def check(*, quick: bool = False, needs: tuple[str, ...] = ()) -> Callable[[Body], Check]:
    """Make a check of ``async def name(case)``; it belongs to the module it is written in."""
    if unknown := set(needs) - FEATURES.keys():
        raise ValueError(f"unknown feature {sorted(unknown)[0]!r}; there are {sorted(FEATURES)}")

    def register(body: Body) -> Check:
        theme = body.__module__.rpartition(".")[2]
        return Check(f"{theme}.{body.__name__}", body, quick, frozenset(needs))

    return register
