"""Find what the native backend has left on this machine, except the stock that it keeps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from paracle_sandbox.backends.native.backend import NativeBackend

PATIENCE_SECONDS = 20.0


class Leftovers:
    """Our child is the launcher, its child the spawner, then the zygote, and below that is a
    process for each slot."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self._groups: set[Path] = set()

    async def check(self) -> None:
        """The spawner refills its stock after a while, so look until all is in order."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while left := self._find():
            assert asyncio.get_running_loop().time() < deadline, left
            await asyncio.sleep(0.05)

    def _find(self) -> list[str]:
        records = list(self._backend.records.all())
        for record in records:
            groups = record.content.get("cgroups", {})
            self._groups |= {Path(path).parent for path in groups.values()}
        slots = {record.path.stem for record in records if record.path.stem.startswith("slot-")}
        left = [f"record {r.sandbox_id}" for r in records if r.path.stem not in slots]
        for group in self._groups:
            left += [f"cgroup {path}" for path in _directories(group) if path.name not in slots]
        if len(slots) > self._backend.settings.stock:
            left.append(f"more in stock than {self._backend.settings.stock}: {sorted(slots)}")
        return left + self._strays(len(slots))

    def _strays(self, in_stock: int) -> list[str]:
        launchers = [p for p in _children([os.getpid()]) if "jail.launch" in _command(p)]
        spawners = _children(launchers)
        parked = _children(_children(spawners))
        # A parked guest may have forked one keeper ahead of need, which keeps no program yet.
        keepers = _children(parked)
        strays = _children(keepers)
        if len(keepers) > len(parked):
            strays += keepers
        if len(parked) > in_stock:
            strays += parked
        return [f"process {pid}: {_command(pid)[:100]!r}" for pid in strays]


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline")


def _directories(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []


def _children(parents: Iterable[int]) -> list[int]:
    return [
        int(child)
        for parent in parents
        for thread in _listdir(f"/proc/{parent}/task")
        for child in _read(f"/proc/{parent}/task/{thread}/children").split()
    ]


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
