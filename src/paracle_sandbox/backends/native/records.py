"""The owner's side of the records: who is there, who is dead, and sweeping up after the dead.

The spawner writes them (``jail/records.py`` says how), its owner adds to those of sandboxes, and
any process of the same user reads them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...channel.frames import to_json
from ...owner import start_time

_SWEEP_SECONDS = 10.0


@dataclass(frozen=True)
class Record:
    """One record file, as read."""

    path: Path
    content: dict[str, Any]

    @property
    def sandbox_id(self) -> str:
        return str(self.content.get("id", self.path.stem))

    @property
    def is_sandbox(self) -> bool:
        """Not only a child that is parked, nor the name that a sandbox's child has for itself."""
        return self.content.get("id") == self.path.stem

    @property
    def instance(self) -> int:
        return int(self.content["instance"])


class RecordStore:
    """The records of this user on this machine."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir

    def all(self) -> Iterator[Record]:
        """Every readable record; one that is being written or is garbage is passed over."""
        try:
            paths = sorted(self._dir.glob("*.json"))
        except OSError:
            return
        for path in paths:
            record = self._read(path)
            if record is not None:
                yield record

    def find(self, sandbox_id: str) -> Record | None:
        """That of a sandbox: what a child is called is nobody's to ask for."""
        if not sandbox_id or "/" in sandbox_id or sandbox_id.startswith("."):
            return None
        record = self._read(Path(self._path(sandbox_id)))
        return record if record and record.is_sandbox else None

    def _read(self, path: Path) -> Record | None:
        """The last whole line counts: a file may be read while one is added."""
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict) and isinstance(content.get("instance"), int):
                    return Record(path, content)
        return None

    def is_taken(self, sandbox_id: str) -> bool:
        return os.path.lexists(self._path(sandbox_id))

    def name(self, slot: str, sandbox_id: str, content: dict[str, Any]) -> None:
        """Make a sandbox of a child: it says so in the child's record, which gets the sandbox's
        name, too. Raises FileExistsError when the id is taken.

        Not a file of its own: some file systems take long to make one where others were just
        removed, and the child's was made ahead."""
        line = to_json(content) + b"\n"
        try:
            _write(self._open(slot, os.O_APPEND), line)
            os.link(self._path(slot), self._path(sandbox_id))
        except FileExistsError:
            raise
        except OSError:  # the child is gone already, or there are no second names here
            self._write_new(sandbox_id, line)

    def _write_new(self, sandbox_id: str, line: bytes) -> None:
        fd = self._open(sandbox_id, os.O_CREAT | os.O_EXCL)
        try:
            _write(fd, line)
        except OSError:
            os.unlink(self._path(sandbox_id))  # half a record would keep the id taken for ever
            raise

    def _open(self, name: str, flags: int) -> int:
        return os.open(self._path(name), os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)

    def _path(self, name: str) -> str:
        return f"{self._dir}/{name}.json"

    def remove(self, sandbox_id: str, slot: str) -> None:
        """If it is still the name of that child: what ended unnoticed may be another's by now."""
        path = self._path(sandbox_id)
        with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
            if f'"{slot}"'.encode() in file.read():
                os.unlink(path)

    def has_slot(self, record: Record) -> bool:
        """Whether its spawner still has the child behind a sandbox."""
        slot = record.content.get("slot")
        return isinstance(slot, str) and (self._dir / f"{slot}.json").exists()

    def is_alive(self, record: Record) -> bool:
        """Whether the spawner of a record lives: it holds its number, and the number is its."""
        lock = self._open_lock(record.instance)
        if lock is None:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(lock, 64, 0).decode(errors="replace") == record.content.get("token")
        finally:
            os.close(lock)
        return False

    def _open_lock(self, instance: int) -> int | None:
        try:
            return os.open(self._dir / "instances" / str(instance), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def sweep(self) -> int:
        """Remove what dead spawners left. Returns how many sandboxes that were."""
        swept = 0
        for record in list(self.all()):
            if self.is_alive(record):
                continue
            with self._hold(record.instance) as free:
                # Not free, but another's: the number has a new holder, which this one was not. What
                # is named after the number alone is the new one's.
                if (free or not self.is_alive(record)) and record.path.exists():
                    _remove_remains(record.content, with_parents=free)
                    with contextlib.suppress(FileNotFoundError):
                        record.path.unlink()
                    swept += record.is_sandbox
        self._sweep_garbage()
        return swept

    @contextlib.contextmanager
    def _hold(self, instance: int) -> Iterator[bool]:
        """True, with the instance number held so that nobody can take it, if it was free."""
        try:
            lock = os.open(
                self._dir / "instances" / str(instance),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            if not os.fstat(lock).st_nlink:  # its holder has just ended, and there may be a new one
                yield False
                return
            yield True
            with contextlib.suppress(OSError):
                (self._dir / "instances" / str(instance)).unlink()
        finally:
            os.close(lock)

    def _sweep_garbage(self) -> None:
        """Directories and half-written files of instances that are gone."""
        for place in self._dir.glob("root-*"):
            number = place.name.removeprefix("root-")
            if number.isdigit():
                with self._hold(int(number)) as free, contextlib.suppress(OSError):
                    if free:
                        place.rmdir()
        for path in self._dir.glob("*.json"):
            old = time.time() - _mtime(path) > 60
            if old and self._read(path) is None:
                with contextlib.suppress(OSError):
                    path.unlink()


def _write(fd: int, line: bytes) -> None:
    """And close it."""
    try:
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def kill_process(process: dict[str, Any]) -> bool:
    """Kill exactly the recorded process: a recycled pid has another start time."""
    try:
        pidfd = os.pidfd_open(int(process["pid"]))
    except (OSError, KeyError, ValueError):
        return False
    try:
        if start_time(int(process["pid"])) != process.get("start"):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(_SWEEP_SECONDS * 1000)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


@lru_cache(maxsize=1)
def identified(pid: int) -> dict[str, Any]:
    """What tells a living process from any other that had, or will have, its number."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"pid": pid, "start": start_time(pid), "boot": boot}


def _remove_remains(content: dict[str, Any], *, with_parents: bool) -> None:
    """The process, if it lives still, and its cgroups. (Its volume went with its spawner.)"""
    init = content.get("init")
    if isinstance(init, dict):
        kill_process(init)
    groups = content.get("cgroups")
    if not isinstance(groups, dict):
        return
    deadline = time.monotonic() + _SWEEP_SECONDS
    for group in {str(path) for path in groups.values()}:
        _kill_group(Path(group))
        while not _rmdir(group) and time.monotonic() < deadline:
            time.sleep(0.002)
        for parent in list(Path(group).parents)[: 2 if with_parents else 0]:
            with contextlib.suppress(OSError):
                parent.rmdir()


def _kill_group(group: Path) -> None:
    """What is in the cgroup of a dead spawner's sandbox is the sandbox's."""
    try:
        pids = (group / "cgroup.procs").read_text().split()
    except OSError:
        return
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)


def _rmdir(path: str) -> bool:
    try:
        Path(path).rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
