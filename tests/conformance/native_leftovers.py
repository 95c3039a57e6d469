"""What the native backend has left on this machine, apart from the stock it keeps for the next."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from paracle_sandbox.backends.native.backend import NativeBackend

PATIENCE_SECONDS = 20.0


class Leftovers:
    """Built while no sandbox lives; the processes of that moment are the spawner's."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self._groups: set[Path] = set()
        self._spawner = set(_descendants(os.getpid())) - self._look()[1]

    async def check(self) -> None:
        """The stock is refilled at the spawner's leisure, so look until all is in order."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while left := self._find():
            assert asyncio.get_running_loop().time() < deadline, left
            await asyncio.sleep(0.05)

    def _find(self) -> list[str]:
        slots, parked = self._look()
        left = [
            f"record {r.sandbox_id}"
            for r in self._backend.records.all()
            if r.path.stem not in slots
        ]
        for group in self._groups:
            left += [f"cgroup {path}" for path in _directories(group) if path.name not in slots]
        strays = set(_descendants(os.getpid())) - parked - self._spawner
        return left + [f"process {pid}: {_command_line(pid)}" for pid in strays]

    def _look(self) -> tuple[set[str], set[int]]:
        """The slots in stock, and their processes."""
        slots: set[str] = set()
        parked: set[int] = set()
        for record in self._backend.records.all():
            groups = record.content.get("cgroups", {})
            self._groups |= {Path(path).parent for path in groups.values()}
            if record.path.stem.startswith("slot-"):
                slots.add(record.path.stem)
                pid = record.content.get("init", {}).get("pid")
                parked |= {pid, *_descendants(pid)} if pid else set()
        return slots, parked


def _directories(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []


def _descendants(root: int) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        for thread in _listdir(f"/proc/{pid}/task"):
            children = [int(word) for word in _read(f"/proc/{pid}/task/{thread}/children").split()]
            found += children
            waiting += children
    return found


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


def _command_line(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ")[:100]
