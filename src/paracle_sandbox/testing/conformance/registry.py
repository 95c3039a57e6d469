"""Defines checks, and the features that some of them need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .case import Case

Body = Callable[[Case], Awaitable[None]]

# A backend has a feature if it keeps this promise. The checks prove it.
FEATURES = {
    "root": "a file system of its own, whose system part is read-only",
    "identity": "a user (paracle, uid 1000), host name and environment of its own",
    "processes": "it sees and signals only its own processes",
    "network": 'no network but the loopback with network_mode="none"',
    "images": "a base_image that must be there",
    "usage": "measured figures of CPU, memory, disk and processes",
    "memory": "memory_mb limits all processes together, and meeting it is reported",
    "cpu": "cpu_cores limits all processes together",
    "pids": "max_processes is enforced",
    "pids_told": "meeting max_processes is reported",
    "disk": "disk_mb is enforced, and meeting it is reported",
    "disk_apart": "disk_mb does not count against memory_mb",
}


@dataclass(frozen=True)
class Check:
    """One clause of the contract. All ``quick`` checks together take a few seconds."""

    name: str
    body: Body
    quick: bool
    needs: frozenset[str]

    @property
    def description(self) -> str:
        return (self.body.__doc__ or self.name).strip()

    def missing(self, features: frozenset[str]) -> list[str]:
        """Return the features that it needs and that are not in ``features``."""
        return sorted(self.needs - features)


def check(*, quick: bool = False, needs: tuple[str, ...] = ()) -> Callable[[Body], Check]:
    """Make a check of ``async def name(case)``. Its name begins with that of its module."""
    if unknown := set(needs) - FEATURES.keys():
        raise ValueError(f"unknown feature {sorted(unknown)[0]!r}; there are {sorted(FEATURES)}")

    def register(body: Body) -> Check:
        theme = body.__module__.rpartition(".")[2]
        return Check(f"{theme}.{body.__name__}", body, quick, frozenset(needs))

    return register
