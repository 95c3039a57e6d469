"""Control groups of both kinds: make one per sandbox, limit it, remove it.

The spawner works on directory descriptors that it opened before it changed its root, so it
needs no path to the cgroup file system afterwards. Reading usage is done elsewhere, by path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

TOP = "paracle-sandbox"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CPU_PERIOD_US = 100_000
_MANY_CORES = 4096
_V1_NEEDED = ("memory", "pids", "cpu")
_V1_WANTED = ("cpuacct",)
_V2_NEEDED = frozenset(("memory", "pids", "cpu"))
# Version 1 counts what TCP and UDP hold apart from memory, and only where it has a limit. (Version
# 2 counts it as memory.)
_V1_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
_V1_SOCKETS_SHARE = 8
_V1_SOCKETS_LEAST = 64 << 20  # with less, a hundred connections at a time take four times as long


class CgroupsUnavailable(Exception):
    """No cgroup can be made here; the message says why."""


class Limits(NamedTuple):
    """The limits of one sandbox that cgroups keep."""

    memory_bytes: int
    cpu_cores: float
    max_processes: int


class Cgroups:
    """The subtree of one spawner: a directory in each hierarchy that is in use."""

    def __init__(self, version: int, parents: dict[str, str], name: str) -> None:
        self.version = version
        self._name = name
        self.paths = {kind: os.path.join(path, TOP, name) for kind, path in parents.items()}
        # Hierarchies that share one mount (cpu,cpuacct) share one directory.
        self._fds = {path: _make_directory(path) for path in dict.fromkeys(self.paths.values())}
        self._above = [_open_directory(path) for path in dict.fromkeys(parents.values())]
        # The name is ours alone now: what is below it is left from one that was killed.
        for fd in self._fds.values():
            for slot in _slots(fd):
                _rmdir(slot, fd)
        if version == 2:
            for path in (os.path.dirname(next(iter(self._fds))), *self._fds):
                _enable_controllers(path)
        else:  # no limit, but the kernel counts from now on: to begin with each slot takes longer
            _write_if_there(self._fd("memory"), _V1_SOCKETS, "-1")

    @classmethod
    def adopt(cls, version: int, directories: list[int]) -> Cgroups:
        """The same in another process, as far as to `enter`."""
        adopted = cls.__new__(cls)
        adopted.version, adopted.paths, adopted._above = version, {}, []
        adopted._fds = {str(fd): fd for fd in directories}
        return adopted

    @property
    def directories(self) -> list[int]:
        """What `adopt` takes."""
        return list(self._fds.values())

    @classmethod
    def find(cls, name: str) -> Cgroups:
        """The subtree for the spawner ``name``, on whichever kind this machine has."""
        v1, v2 = _mounts()
        if v2 and _controllers(v2) >= _V2_NEEDED:
            return cls(2, {"unified": _delegated_parent(v2)}, name)
        missing = [kind for kind in _V1_NEEDED if kind not in v1]
        if missing:
            raise CgroupsUnavailable(f"no cgroup controller for {', '.join(missing)}")
        parents = {kind: v1[kind] for kind in (*_V1_NEEDED, *_V1_WANTED) if kind in v1}
        try:
            return cls(1, parents, name)
        except PermissionError as error:
            raise CgroupsUnavailable("cgroups are not writable for this user") from error

    def _fd(self, kind: str) -> int:
        return self._fds[self.paths["unified" if self.version == 2 else kind]]

    def create(self, slot: str) -> None:
        for fd in self._fds.values():
            os.mkdir(slot, 0o755, dir_fd=fd)

    def enter(self, slot: str) -> None:
        """Move this process there. Takes 0.2 ms if another was moved just before, and more than
        10 ms otherwise: the kernel waits until no process is in the middle of a fork."""
        for fd in self._fds.values():
            _write(fd, f"{slot}/cgroup.procs", "0")

    @contextlib.contextmanager
    def open(self, slot: str) -> Iterator[int]:
        """A descriptor of the one directory that a slot has with version 2."""
        group = os.open(slot, _DIRECTORY, dir_fd=self._fd("unified"))
        try:
            yield group
        finally:
            os.close(group)

    def limit(self, slot: str, limits: Limits) -> None:
        quota = max(1000, int(limits.cpu_cores * _CPU_PERIOD_US))
        memory = str(limits.memory_bytes)
        if self.version == 2:
            fd = self._fd("unified")
            _write(fd, f"{slot}/memory.max", memory)
            _write_if_there(fd, f"{slot}/memory.swap.max", "0")
            _write(fd, f"{slot}/cpu.max", f"{quota} {_CPU_PERIOD_US}")
            _write(fd, f"{slot}/pids.max", str(limits.max_processes))
            return
        self._limit_memory(slot, memory)
        sockets = max(_V1_SOCKETS_LEAST, limits.memory_bytes // _V1_SOCKETS_SHARE)
        _write_if_there(self._fd("memory"), f"{slot}/{_V1_SOCKETS}", str(sockets))
        _write(self._fd("cpu"), f"{slot}/cpu.cfs_period_us", str(_CPU_PERIOD_US))
        _write(self._fd("cpu"), f"{slot}/cpu.cfs_quota_us", str(quota))
        _write(self._fd("pids"), f"{slot}/pids.max", str(limits.max_processes))

    def lift_cpu(self, slot: str) -> None:
        """Killed processes die on their own time: hundreds that share a tenth of a processor would
        take half a minute. Not "no limit": to have the last of those go is dear."""
        quota = str(_CPU_PERIOD_US * _MANY_CORES)
        if self.version == 2:
            _write(self._fd("unified"), f"{slot}/cpu.max", f"{quota} {_CPU_PERIOD_US}")
        else:
            _write(self._fd("cpu"), f"{slot}/cpu.cfs_quota_us", quota)

    def _limit_memory(self, slot: str, memory: str) -> None:
        """Version 1: memory may never exceed memory with swap. So whichever of the two goes
        further goes second: one of them if the limit is lowered, the other if it is raised."""
        plain, with_swap = f"{slot}/memory.limit_in_bytes", f"{slot}/memory.memsw.limit_in_bytes"
        try:
            _write(self._fd("memory"), plain, memory)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write_if_there(self._fd("memory"), with_swap, memory)
            _write(self._fd("memory"), plain, memory)
        _write_if_there(self._fd("memory"), with_swap, memory)

    def remove(self, slot: str, patience_seconds: float = 0.0) -> bool:
        """Remove an emptied group. False when it is still busy after the given patience."""
        deadline = time.monotonic() + patience_seconds
        for fd in self._fds.values():
            while not _rmdir(slot, fd):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.0005)
        return True

    def close(self) -> None:
        """Remove the subtree; the shared top directory too when no other spawner uses it."""
        for fd in self._fds.values():
            for slot in _slots(fd):
                _rmdir(slot, fd)
            os.close(fd)
        for above in self._above:
            with contextlib.suppress(OSError):
                os.rmdir(f"{TOP}/{self._name}", dir_fd=above)
                os.rmdir(TOP, dir_fd=above)
            os.close(above)
        self._fds.clear()
        self._above.clear()


def find_own_group() -> str:
    """The file by which a process enters a group of version 1 that this process is in."""
    v1, _ = _mounts()
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as groups:
        for line in groups:
            _, kinds, path = line.rstrip("\n").split(":", 2)
            if mount := v1.get(kinds.partition(",")[0]):
                return f"{mount}{path}/cgroup.procs"
    raise FileNotFoundError(errno.ENOENT, "no cgroup file system of version 1 is mounted")


def _mounts() -> tuple[dict[str, str], str | None]:
    """Find where each v1 controller is mounted, and the v2 mount if there is one."""
    v1: dict[str, str] = {}
    v2 = None
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            _, path, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                v2 = path
            elif kind == "cgroup":
                v1.update((option, path) for option in options.split(","))
    return v1, v2


def _controllers(path: str, file: str = "cgroup.controllers") -> frozenset[str]:
    try:
        with open(os.path.join(path, file), encoding="ascii") as names:
            return frozenset(names.read().split())
    except OSError:
        return frozenset()


def _delegated_parent(mount: str) -> str:
    """The group to work below: the root for root, else an ancestor that was delegated to us."""
    if os.access(os.path.join(mount, "cgroup.procs"), os.W_OK):
        _enable_controllers(mount)
        return mount
    with open("/proc/self/cgroup", encoding="utf-8") as groups:
        own = next((line[3:].strip() for line in groups if line.startswith("0::")), "/")
    path = own
    while path not in ("", "/"):
        path = os.path.dirname(path)
        candidate = os.path.join(mount, path.lstrip("/"))
        if not os.access(os.path.join(candidate, "cgroup.procs"), os.W_OK):
            continue
        # Refused for a group that has processes of its own, or not the controllers.
        with contextlib.suppress(OSError):
            _enable_controllers(candidate)
            return candidate
    raise CgroupsUnavailable(
        "no cgroup is delegated to this user (systemd-run --user --scope -p Delegate=yes gives one)"
    )


def _enable_controllers(path: str) -> None:
    missing = _V2_NEEDED - _controllers(path, "cgroup.subtree_control")
    if missing:
        with open(os.path.join(path, "cgroup.subtree_control"), "w", encoding="ascii") as control:
            control.write(" ".join(f"+{name}" for name in sorted(missing)))


def _make_directory(path: str) -> int:
    # Another spawner may remove the shared top directory just now, because it was the last.
    for _ in range(100):
        try:
            os.makedirs(path, 0o755, exist_ok=True)
            return _open_directory(path)
        except FileNotFoundError:
            continue
    raise OSError(errno.EAGAIN, "a cgroup directory keeps vanishing", path)


def _open_directory(path: str) -> int:
    return os.open(path, _DIRECTORY)


def _slots(fd: int) -> list[str]:
    return [e.name for e in os.scandir(fd) if e.is_dir(follow_symlinks=False)]


def _rmdir(slot: str, fd: int) -> bool:
    try:
        os.rmdir(slot, dir_fd=fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # busy still, or for good: the caller reports it in the end
    return True


def _write(directory: int, file: str, text: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from None
    finally:
        os.close(fd)


def _write_if_there(directory: int, file: str, text: str) -> None:
    """Write to a file of swap or socket accounting, which a kernel may not have, or no more."""
    try:
        _write(directory, file, text)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
            raise
