"""The owner's side of the records: who is there, who is dead, and sweeping up after the dead.

The spawner writes them (``jail/records.py`` says how), its owner adds to those of sandboxes, and
any process of the same user reads them. They decide what gets killed, so the state directory that
they are in may belong to nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...channel.frames import to_json
from ...errors import BackendUnavailableError
from ...host.own_directory import (
    STATE_DIRECTORY,
    ForeignDirectoryError,
    open_own_directory,
    reopen_own_directory,
)
from ..machine.owner import boot_id, pid_namespace, start_time
from .descriptors import is_shortage, no_descriptor

_SWEEP_SECONDS = 10.0


# A record is a few hundred bytes and the labels of its sandbox.
_MOST_BYTES = 1 << 20
_MOST_LABEL_CHARACTERS = 80_000  # six bytes each where they are escaped
_INSTANCES = "instances"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GARBAGE_SECONDS = 60.0
# The directory above the cgroups of all spawners: see jail/limits/cgroups.py.
_CGROUP_TOP = "paracle-sandbox"


@dataclass(frozen=True)
class Record:
    """One record file, as read. Each field that is used has the type that it should have."""

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
    """The records of this user on this machine.

    Each method opens the state directory, refuses one that is not this user's alone
    (BackendUnavailableError), and then works below its descriptor."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir
        self._known = (-1, -1)

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        path = str(self._dir)
        directory = reopen_own_directory(path, self._known)
        if directory is None:
            directory = open_state_directory(path, make=make)
            about = os.fstat(directory)
            self._known = about.st_dev, about.st_ino
        try:
            yield directory
        finally:
            os.close(directory)

    def all(self) -> list[Record]:
        """Every readable record; one that is being written or is garbage is passed over."""
        try:
            with self._opened() as directory:
                return self._all(directory)
        except FileNotFoundError:
            return []

    def _all(self, directory: int) -> list[Record]:
        found = (self._read(directory, name) for name in _record_names(directory))
        return [record for record in found if record is not None]

    def find(self, sandbox_id: str) -> Record | None:
        """Return the record of a sandbox. A child has none that may be asked for."""
        if not sandbox_id or "/" in sandbox_id or sandbox_id.startswith("."):
            return None
        try:
            with self._opened() as directory:
                record = self._read(directory, _file_name(sandbox_id))
        except FileNotFoundError:
            return None
        return record if record and record.is_sandbox else None

    def _read(self, directory: int, name: str) -> Record | None:
        """The last whole line counts: a file may be read while one is added. None for what is
        gone, or no record of ours. Raises OSError when it cannot be known what it is."""
        text = _text_of(directory, name)
        for line in reversed(text.splitlines()):
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(line)
                if is_record(content):
                    return Record(self._dir / name, content)
        return None

    def is_taken(self, sandbox_id: str) -> bool:
        try:
            with self._opened() as directory:
                os.lstat(_file_name(sandbox_id), dir_fd=directory)
        except FileNotFoundError:
            return False
        return True

    def has_any(self) -> bool:
        """Whether there may be something to sweep: to start a thread takes longer than to look."""
        try:
            with self._opened() as directory:
                return any(_is_swept(name) for name in os.listdir(directory))
        except FileNotFoundError:
            return False

    def name(self, slot: str, sandbox_id: str, content: dict[str, Any]) -> None:
        """Make a sandbox of a child: it says so in the child's record, which gets the sandbox's
        name, too. Raises FileExistsError when the id is taken.

        Not a file of its own: some file systems take long to make one where others were just
        removed, and the child's was made ahead."""
        line = to_json(content) + b"\n"
        child, sandbox = _file_name(slot), _file_name(sandbox_id)
        with self._opened() as directory:
            try:
                _write(_open_to_write(directory, child, os.O_APPEND), line)
                os.link(
                    child, sandbox, src_dir_fd=directory, dst_dir_fd=directory,
                    follow_symlinks=False,
                )  # fmt: skip
            except FileExistsError:
                raise
            except OSError:  # the child is gone already, or there are no second names here
                _write_new(directory, sandbox, line)

    def mark(self, sandbox_id: str, content: dict[str, Any]) -> None:
        """Say something else of a sandbox that has its name already. Raises OSError."""
        with self._opened() as directory:
            file = _open_to_write(directory, _file_name(sandbox_id), os.O_APPEND)
            _write(file, to_json(content) + b"\n")

    def remove(self, sandbox_id: str, slot: str) -> None:
        """If it is still the name of that child: what ended unnoticed may be another's by now."""
        name = _file_name(sandbox_id)
        with contextlib.suppress(FileNotFoundError), self._opened() as directory:
            if f'"{slot}"'.encode() in _text_of(directory, name):
                os.unlink(name, dir_fd=directory)

    def has_slot(self, record: Record) -> bool:
        """Whether its spawner still has the child behind a sandbox."""
        slot = record.content.get("slot")
        return isinstance(slot, str) and self.is_taken(slot)

    def is_alive(self, record: Record) -> bool:
        """Whether the spawner of a record lives: it holds its number, and the number is its."""
        try:
            with self._opened() as directory:
                return _is_alive(directory, record)
        except FileNotFoundError:
            return False

    def sweep(self) -> int:
        """Remove what dead spawners left. Returns how many sandboxes that were."""
        try:
            with self._opened() as directory:
                swept = self._sweep_records(directory)
                self._sweep_garbage(directory)
                return swept
        except FileNotFoundError:
            return 0

    def _sweep_records(self, directory: int) -> int:
        swept = 0
        for record in self._all(directory):
            if _is_alive(directory, record):
                continue
            with _hold(directory, record.instance) as free:
                # Not free, but another's: the number has a new holder, which this one was not. What
                # is named after the number alone is the new one's.
                if not free and _is_alive(directory, record):
                    continue
                # Else another sweep has it; or the disk fails, and a later one will.
                with contextlib.suppress(OSError):
                    os.lstat(record.path.name, dir_fd=directory)
                    if not _remove_remains(directory, record.content, with_parents=free):
                        continue  # the next sweep tries again
                    os.unlink(record.path.name, dir_fd=directory)
                    swept += record.is_sandbox
        return swept

    def _sweep_garbage(self, directory: int) -> None:
        """Directories and half-written files of instances that are gone."""
        for name in os.listdir(directory):
            number = name.removeprefix("root-")
            if name.startswith("root-") and number.isdecimal():
                with _hold(directory, int(number)) as free, contextlib.suppress(OSError):
                    if free:
                        os.rmdir(name, dir_fd=directory)
        for name in _record_names(directory):
            with contextlib.suppress(OSError):
                about = os.lstat(name, dir_fd=directory)
                old = time.time() - about.st_mtime > _GARBAGE_SECONDS
                if old and not stat.S_ISDIR(about.st_mode) and self._read(directory, name) is None:
                    os.unlink(name, dir_fd=directory)


def is_record(content: object) -> bool:
    """Whether each field that somebody may use is of the kind that it should be."""
    if not isinstance(content, dict):
        return False
    number = content.get("instance")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 20:
        return False
    texts = ("id", "token", "slot", "state", "template")
    if not all(isinstance(content[name], str) for name in texts if name in content):
        return False
    maps = ("owner", "init", "cgroups", "labels", "config")
    if not all(isinstance(content[name], dict) for name in maps if name in content):
        return False
    for name in ("cgroups", "labels"):
        if not all(isinstance(value, str) for value in content.get(name, {}).values()):
            return False
    for process in (content.get("owner", {}), content.get("init", {})):
        numbers = (process.get("pid", 0), process.get("start") or 0)
        if not all(isinstance(number, int) for number in numbers):
            return False
    numbers = (content.get("created_at", 0.0), content.get("cpu_before", 0.0))
    return all(
        isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1e12
        for one in numbers
    )


def fits(labels: Mapping[str, str]) -> bool:
    """Whether a record with these labels can be read again."""
    return (
        sum(len(str(key)) + len(str(value)) for key, value in labels.items())
        <= _MOST_LABEL_CHARACTERS
    )


def _file_name(name: str) -> str:
    if "/" in name or name.startswith("."):
        raise ValueError(f"not the name of a record: {name!r}")
    return f"{name}.json"


def _record_names(directory: int) -> list[str]:
    names = os.listdir(directory)
    return sorted(name for name in names if name.endswith(".json") and not name.startswith("."))


def _is_swept(name: str) -> bool:
    return name.endswith(".json") or name.startswith("root-")


def _text_of(directory: int, name: str) -> bytes:
    """The content of a record; nothing for what is gone, or is no file of ours of fitting size.
    Raises OSError when it cannot be known what it is."""
    try:
        fd = os.open(name, _READ, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
            raise
        return b""
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return b""
        text = _read_some(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    return text if len(text) <= _MOST_BYTES else b""


def _read_some(fd: int, most: int) -> bytes:
    pieces = []
    while most > 0 and (piece := os.read(fd, min(most, 1 << 16))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _open_to_write(directory: int, name: str, flags: int) -> int:
    flags |= os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(name, flags, 0o600, dir_fd=directory)


def _write_new(directory: int, name: str, line: bytes) -> None:
    fd = _open_to_write(directory, name, os.O_CREAT | os.O_EXCL)
    try:
        _write(fd, line)
    except OSError:
        os.unlink(name, dir_fd=directory)  # half a record would keep the id taken for ever
        raise


def _is_alive(directory: int, record: Record) -> bool:
    lock = _open_lock(directory, record.instance)
    if lock is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, 64, 0).decode(errors="replace") == record.content.get("token")
    finally:
        os.close(lock)
    return False


def _open_lock(directory: int, instance: int, flags: int = 0) -> int | None:
    """The file that is locked by whoever has the number. None when there is none, and None for a
    thing of another kind. Raises OSError when that cannot be known."""
    try:
        instances = open_own_directory(_INSTANCES, parent=directory)
    except (FileNotFoundError, ForeignDirectoryError):
        return None
    try:
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(str(instance), flags, 0o600, dir_fd=instances)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        return None
    finally:
        os.close(instances)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        return None
    return lock


@contextlib.contextmanager
def _hold(directory: int, instance: int) -> Iterator[bool]:
    """True, with the instance number held so that nobody can take it, if it was free."""
    lock = _open_lock(directory, instance, os.O_CREAT)
    if lock is None:
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
            os.unlink(f"{_INSTANCES}/{instance}", dir_fd=directory)
    finally:
        os.close(lock)


def _write(fd: int, line: bytes) -> None:
    """Read it, and close it."""
    try:
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


@lru_cache(maxsize=1)
def identified(pid: int) -> dict[str, Any]:
    """The facts that tell a living process from any other that had, or will have, its pid."""
    return {
        "pid": pid,
        "start": start_time(pid),
        "boot": boot_id(),
        "namespace": pid_namespace(),
    }


@contextlib.contextmanager
def pidfd_of(process: Mapping[str, Any]) -> Iterator[int | None]:
    """A descriptor of exactly the process with this number and start time; None when it is gone.
    As long as the descriptor is not readable, the number is that process's."""
    pid, start = process.get("pid"), process.get("start")
    if not isinstance(pid, int) or pid <= 0 or start is None:
        yield None
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd if start_time(pid) == start and not has_ended(pidfd) else None
    finally:
        os.close(pidfd)


def has_ended(pidfd: int, seconds: float = 0.0) -> bool:
    """Whether its process has ended, or does within so many seconds."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def kill_init(content: Mapping[str, Any]) -> bool:
    """Kill the first process of a recorded sandbox, and wait for its end.

    Only a process that is surely it: of this boot and this pid namespace, with the recorded number
    and start time, and the first of a pid namespace of its own."""
    owner = content.get("owner", {})
    if (owner.get("boot"), owner.get("namespace")) != (boot_id(), pid_namespace()):
        return False
    init = content.get("init", {})
    try:
        with pidfd_of(init) as pidfd:
            if pidfd is None or not _is_first_of_a_namespace(init["pid"]) or has_ended(pidfd):
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return has_ended(pidfd, _SWEEP_SECONDS)
    except OSError:
        return False


def _is_first_of_a_namespace(pid: int) -> bool:
    """Such a process has two numbers at least, and the innermost is 1."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        name, _, numbers = line.partition(":")
        if name == "NSpid":
            inside = numbers.split()
            return len(inside) > 1 and inside[-1] == "1"
    return False


def _remove_remains(directory: int, content: Mapping[str, Any], *, with_parents: bool) -> bool:
    """The process, if it lives still, and its cgroups. (Its volume went with its spawner.) False
    when something stays."""
    kill_init(content)
    groups = set(content.get("cgroups", {}).values())
    deadline = time.monotonic() + _SWEEP_SECONDS
    all_gone = True
    for group in groups:
        if not _is_its_group(group, directory, content):
            continue
        _kill_group(group)
        while not (gone := _rmdir(group)) and time.monotonic() < deadline:
            time.sleep(0.002)
        all_gone = all_gone and gone
        for parent in list(Path(group).parents)[: 2 if with_parents else 0]:
            with contextlib.suppress(OSError):
                parent.rmdir()
    return all_gone


def _is_its_group(path: str, directory: int, content: Mapping[str, Any]) -> bool:
    """Whether a cgroup has the name that a spawner of this state directory gives to this child."""
    return path.startswith("/") and Path(path).parts[-3:] == _group_name(directory, content)


def _group_name(directory: int, content: Mapping[str, Any]) -> tuple[str, str, str]:
    about = os.fstat(directory)
    spawner = f"{about.st_dev:x}-{about.st_ino:x}-{content.get('instance')}"
    return _CGROUP_TOP, spawner, str(content.get("slot"))


def _kill_group(group: str) -> None:
    """Kill what is in the cgroup of a dead spawner's sandbox: it is the sandbox's."""
    with contextlib.suppress(OSError):  # version 2 kills all of them at once
        _write(os.open(f"{group}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC), b"1")
        return
    try:
        fd = os.open(f"{group}/cgroup.procs", _READ)
    except OSError:
        return
    try:
        pids = _read_some(fd, _MOST_BYTES).split()
    except OSError:
        return
    finally:
        os.close(fd)
    name = "/" + "/".join(Path(group).parts[-3:])
    for pid in map(int, pids):
        if pid > 0:  # 0 is one of another pid namespace: to us it would mean our own group
            with contextlib.suppress(OSError):
                _kill_member(pid, name)


def _kill_member(pid: int, group: str) -> None:
    """The number may have been reused since it was read: whose it is now, the kernel says."""
    pidfd = os.pidfd_open(pid)
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
        if any(line.endswith(group) for line in lines) and not has_ended(pidfd):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def open_state_directory(path: str, *, make: bool = False) -> int:
    """A descriptor of the state directory. Raises BackendUnavailableError for a directory of
    another user, FileNotFoundError when there is none and none is to be made, and OSError when
    there is no descriptor to be had."""
    try:
        return open_own_directory(path, make=make)
    except ForeignDirectoryError as error:
        raise BackendUnavailableError(
            f"The state directory {path} is not this user's alone: {error.strerror}. Nothing in it "
            "was believed or touched. Remove it, or set PARACLE_STATE_DIR to another.",
            step=STATE_DIRECTORY,
        ) from error
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BackendUnavailableError(
            f"The state directory cannot be used: {error}. Set PARACLE_STATE_DIR to another.",
            step=STATE_DIRECTORY,
        ) from error


def require_own_directory(path: str) -> None:
    """Make the state directory if need be. Raises BackendUnavailableError for a directory of
    another user, or a link."""
    try:
        os.close(open_state_directory(path, make=True))
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor() from error
        raise BackendUnavailableError(
            f"The state directory cannot be used: {error}. Set PARACLE_STATE_DIR to another.",
            step=STATE_DIRECTORY,
        ) from error
