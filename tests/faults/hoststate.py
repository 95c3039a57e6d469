"""See from the host what the machine holds of our sandboxes, and what is left of them later.

A ``Place`` gives a test directories and a range of host uids that no other program on the machine
uses, so its processes, cgroups and files can be told from those of other runs. ``HostState.take``
looks. ``left_since`` names every difference, and an empty result is "Clean".
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import glob
import os
import secrets
import shutil
import time
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from paracle_sandbox.settings import Settings

CLEAN_SECONDS = 10.0
# An event loop or a first import may open so many descriptors and keep them.
FD_TOLERANCE = 2
# Spawners take blocks of 8192 uids, by a number that no other spawner on the machine has, not even
# in other test lanes.
_UIDS = 64 * 8192
_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_CHILD_SUBREAPER = 36


class Place:
    """The directories and uids where one test keeps its sandboxes, apart from all others."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.state = base / "state"
        self.data = base / "data"
        self.temp = base / "temp"
        for path in (self.state, self.data, self.temp):
            path.mkdir(parents=True, exist_ok=True)
        found = self.state.stat()
        self.cgroup_name = f"{found.st_dev:x}-{found.st_ino:x}-"
        first = 3_000_000_000 + secrets.randbelow(2000) * _UIDS
        self.uids = range(first, first + _UIDS)

    def settings(self, **more: object) -> Settings:
        values: dict[str, object] = {"stock": 0, "template_build": False, **more}
        return Settings(
            state_dir=str(self.state),
            data_dir=str(self.data),
            uid_base=self.uids.start,
            **values,  # type: ignore[arg-type]
        )

    def environment(self, **more: str) -> dict[str, str]:
        """Return the same settings for an owner that is a process of its own."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(self.base),
            "TMPDIR": str(self.temp),
            "PARACLE_STATE_DIR": str(self.state),
            "PARACLE_DATA_DIR": str(self.data),
            "PARACLE_UID_BASE": str(self.uids.start),
            "PARACLE_TEMPLATE_BUILD": "false",
            "PARACLE_STOCK": "0",
            **more,
        }

    def remove(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)

    def processes(self) -> dict[tuple[int, int], str]:
        """Return the processes that run as one of our uids or in one of our cgroups, by pid and
        start time."""
        found = {}
        for pid in _pids():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if self._is_ours(pid):
                    found[pid, start_time(pid)] = describe(pid)
        return found

    def _is_ours(self, pid: int) -> bool:
        if state_of(pid) == "X":
            return False
        status = _text(f"/proc/{pid}/status")
        uids = [int(word) for word in _line(status, "Uid:").split()[1:]]
        if any(uid in self.uids for uid in uids):
            return True
        return self.cgroup_name in _text(f"/proc/{pid}/cgroup")

    def cgroups(self) -> set[str]:
        """Return our cgroups of both kinds: one tree, or one for each controller."""
        name = f"paracle-sandbox/{self.cgroup_name}*"
        # Files may vanish while we look. Neither of these calls minds that, but Path.glob does.
        tops = [path for top in (name, f"*/{name}") for path in glob.glob(f"{_CGROUPS}/{top}")]
        return {directory for top in tops for directory, _, _ in os.walk(top)}


@dataclass(frozen=True)
class HostState:
    """The result of one look at the machine.

    Processes below this one count as ours, too, whatever their uid, except those that an owner of
    another place, which was there already at the ``earlier`` look, starts in the meantime.
    """

    processes: dict[tuple[int, int], str] = field(default_factory=dict)
    cgroups: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    descriptors: int = 0

    @classmethod
    def take(cls, place: Place, earlier: HostState | None = None) -> HostState:
        strangers = {pid for pid, _ in earlier.processes} if earlier else set()
        processes = {**below(os.getpid(), strangers), **place.processes()}
        return cls(
            processes=processes,
            cgroups=frozenset(place.cgroups()),
            mounts=frozenset(_mounts(place)),
            namespaces=frozenset(_namespaces([pid for pid, _ in processes])),
            loops=frozenset(_loops(place)),
            files=frozenset(_files(place)),
            descriptors=len(os.listdir("/proc/self/fd")),
        )

    def left_since(self, before: HostState) -> list[str]:
        """Return everything that is there now and was not then; empty when all is gone."""
        new = self.processes.keys() - before.processes.keys()
        left = [f"process {self.processes[key]}" for key in sorted(new)]
        for name in ("cgroups", "mounts", "namespaces", "loops", "files"):
            extra = getattr(self, name) - getattr(before, name)
            left += [f"{name[:-1]} {item}" for item in sorted(extra)]
        opened = self.descriptors - before.descriptors
        if abs(opened) > FD_TOLERANCE:
            left.append(f"{opened:+d} descriptors: {', '.join(_own_descriptors())}")
        return left


async def clean_since(
    before: HostState, place: Place, within: float = CLEAN_SECONDS, *, but_records: bool = False
) -> None:
    """Wait for Clean. After ``within`` seconds an AssertionError names what is left.

    ``but_records``: an owner that was killed leaves the records that it wrote, and only these, to
    the next start.
    """
    deadline = time.monotonic() + within
    kept = f"file {place.state}/"
    while left := [
        item
        for item in HostState.take(place, before).left_since(before)
        if not (but_records and item.startswith(kept) and item.endswith(".json"))
    ]:
        if time.monotonic() > deadline:
            raise AssertionError(f"left after {within:g} s:\n  " + "\n  ".join(left))
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def adopting():
    """Make orphans of processes that we kill our children, so that ``below`` still finds them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def below(top: int, but: Container[int] = ()) -> dict[tuple[int, int], str]:
    """Return the living descendants of a process, without those of ``but``.

    A zombie holds nothing but its number.
    """
    parents: dict[int, int] = {}
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[pid] = int(_stat(pid)[1])
    found = {}
    for pid in parents:
        above = parents[pid]
        while above not in (0, top):
            above = 0 if above in but else parents.get(above, 0)
        with contextlib.suppress(OSError, ValueError, IndexError):
            if above == top and state_of(pid) not in "ZX":
                found[pid, start_time(pid)] = describe(pid)
    return found


def children_of(parent: int) -> list[int]:
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(_stat(pid)[1]) == parent:
                found.append(pid)
    return found


def is_alive(pid: int) -> bool:
    try:
        return state_of(pid) not in "ZX"
    except (OSError, IndexError):
        return False


def state_of(pid: int) -> str:
    return _stat(pid)[0]


def start_time(pid: int) -> int:
    return int(_stat(pid)[19])


def describe(pid: int) -> str:
    status = _text(f"/proc/{pid}/status")
    command = _text(f"/proc/{pid}/cmdline").replace("\0", " ")[:80]
    words = {key: _line(status, f"{key}:").split()[1] for key in ("Name", "State", "PPid", "Uid")}
    return f"{pid} {words} {command!r}"


def _stat(pid: int) -> list[str]:
    """Return the fields of the stat file from the third (state) on.

    The name before it may contain anything.
    """
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def _mounts(place: Place) -> set[str]:
    """Return our mounts in this namespace.

    There should be none, because sandboxes mount in their own. A mount of theirs is somewhere below
    the place.
    """
    lines = _text("/proc/self/mountinfo").splitlines()
    return {line for line in lines if str(place.base) in line}


def _namespaces(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        for kind in _KINDS:
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.split(":")[0] in _KINDS:
                found.add(target)
    own = {os.readlink(f"/proc/self/ns/{kind}") for kind in _KINDS}
    return found - own


def _loops(place: Place) -> set[str]:
    found = set()
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if str(place.base) in (name := path.read_text().strip()):
                found.add(f"{path.parts[3]} {name}")
    return found


def _files(place: Place) -> set[str]:
    """Return records, roots, locks and temporary files.

    It leaves out the directories that hold them, and what is remembered of images, which belongs to
    no sandbox.
    """
    kept = {place.state / name for name in ("instances", "stores", "drafts")}
    kept |= {place.state, place.data, place.temp}
    roots = (place.state, place.data, place.temp)
    found = {path for root in roots if root.exists() for path in root.rglob("*")}
    remembered = place.state / "images-without-files"
    return {str(path) for path in found - kept if not path.is_relative_to(remembered)}


def _own_descriptors() -> list[str]:
    found = []
    for fd in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(OSError):
            found.append(f"{fd}={os.readlink(f'/proc/self/fd/{fd}')}")
    return found
