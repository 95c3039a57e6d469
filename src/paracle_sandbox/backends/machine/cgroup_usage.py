"""Read what a sandbox uses from its cgroup."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...host.platforms import open_flags
from ..values import Usage

_CONTROLLERS = ("memory", "pids", "cpuacct", "cpu")
# What cgroup v1 shows where there is no limit is a little below 2**63.
_NO_LIMIT = 1 << 60
_ROOT = "/sys/fs/cgroup"
_V1_MARK = "memory.max_usage_in_bytes"
_MUCH_CACHE = 1 << 20
# The kernel hands these files out by the page, or the line if they are lists: less than half a page
# is all there is.
_WHOLE = mmap.PAGESIZE // 2


def read_usage(groups: Mapping[str, str], init_pid: int, *, network_mode: str = "bridge") -> Usage:
    """Read what a sandbox uses. Raises FileNotFoundError when the sandbox is gone."""
    received, sent = network_bytes(init_pid, network_mode)
    usage = _unified(groups["unified"]) if "unified" in groups else _separate(groups)
    return replace(usage, network_rx_bytes=received, network_tx_bytes=sent)


def read_cpu(groups: Mapping[str, str]) -> float:
    """Read the seconds of CPU that all its processes had. Raises FileNotFoundError."""
    if "unified" in groups:
        return _pairs(f"{groups['unified']}/cpu.stat").get("usage_usec", 0) / 1e6
    accounting = groups.get("cpuacct")
    return read_number(f"{accounting}/cpuacct.usage") / 1e9 if accounting else 0.0


class MemoryPeak:
    """The most memory that a sandbox had, without page cache.

    The kernel keeps one high-water mark for both together. When the mark has risen since the last
    look, the page cache that was seen is taken off; otherwise the peak is the most that was seen.
    So a program that had much memory and filled the cache between two looks is reported with less
    than it had.
    """

    def __init__(self) -> None:
        self._mark = 0
        self._cache = 0
        self._peak = 0

    def of(self, usage: Usage) -> Usage:
        """Return the same usage, with this peak in place of the kernel's mark."""
        if usage.memory_peak_bytes > self._mark:
            self._mark = usage.memory_peak_bytes
            cache = max(self._cache, usage.cache_bytes)
            self._peak = max(self._peak, usage.memory_peak_bytes - cache)
        self._cache = usage.cache_bytes
        self._peak = max(self._peak, usage.memory_bytes)
        return replace(usage, memory_peak_bytes=self._peak)

    def begin_anew(self, groups: Mapping[str, str]) -> None:
        """Reset the kernel's mark, where that is possible: a mark that the cache has driven up to
        the limit says nothing any more."""
        if "memory" in groups and self._mark > self._peak + _MUCH_CACHE:
            with contextlib.suppress(OSError):
                _write(f"{groups['memory']}/{_V1_MARK}", b"0")
                self._mark = 0


def cgroups_of(pid: int, container: str) -> dict[str, str]:
    """Return the cgroup directories of a container's first process; empty when they are not on this
    machine.

    The path has to name the container: that proves that the process is on this machine. The pid
    that an engine elsewhere gives may be any process here.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if container not in path:
            continue
        if number == "0" and Path(f"{_ROOT}{path}/memory.stat").exists():
            return {"unified": f"{_ROOT}{path}"}
        for name in set(controllers.split(",")) & set(_CONTROLLERS):
            directory = Path(f"{_ROOT}/{controllers}{path}")
            found[name] = str(directory if directory.is_dir() else Path(f"{_ROOT}/{name}{path}"))
    return found if {"memory", "pids"} <= found.keys() else {}


@dataclass(frozen=True)
class KeptLimits:
    """The limits that the kernel keeps for a sandbox: None where it keeps none."""

    memory_bytes: int | None
    cpu_cores: float | None
    processes: int | None


def read_limits(groups: Mapping[str, str]) -> KeptLimits:
    """Read the limits. Raises FileNotFoundError when the sandbox is gone."""
    if group := groups.get("unified"):
        memory, pids = f"{group}/memory.max", f"{group}/pids.max"
        quota, _, period = _text(f"{group}/cpu.max").partition(" ")
    else:
        memory = f"{groups['memory']}/memory.limit_in_bytes"
        pids = f"{groups['pids']}/pids.max"
        cpu = groups.get("cpu", groups["pids"])
        quota, period = (_text(f"{cpu}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    share, whole = _limit(quota), _limit(period)
    return KeptLimits(
        _limit(_text(memory)), share / whole if share and whole else None, _limit(_text(pids))
    )


def _limit(text: str) -> int | None:
    number = int(text) if text.strip().isdigit() else 0  # "max" and -1 are none
    return number if 0 < number < _NO_LIMIT else None


def _unified(group: str) -> Usage:
    memory = _pairs(f"{group}/memory.stat")
    current = read_number(f"{group}/memory.current")
    # Read after the current value, and never below it: a sandbox grows while we look.
    peak = max(current, read_number(f"{group}/memory.peak"))
    cache = memory.get("file", 0) - memory.get("shmem", 0)
    return Usage(
        cpu_seconds=read_cpu({"unified": group}),
        memory_bytes=max(0, current - cache),
        memory_peak_bytes=peak,
        cache_bytes=max(0, cache),
        processes=read_number(f"{group}/pids.current"),
        oom_kills=_pairs(f"{group}/memory.events").get("oom_kill", 0),
        pids_denied=_pairs(f"{group}/pids.events").get("max", 0),
    )


def _separate(groups: Mapping[str, str]) -> Usage:
    memory, pids = groups["memory"], groups["pids"]
    detail = _pairs(f"{memory}/memory.stat")
    current = read_number(f"{memory}/memory.usage_in_bytes")
    # "cache" counts shared memory too, which cannot be dropped and so is used for good.
    cache = detail.get("total_cache", 0) - detail.get("total_shmem", 0)
    return Usage(
        cpu_seconds=read_cpu(groups),
        memory_bytes=max(0, current - cache),
        memory_peak_bytes=max(current, read_number(f"{memory}/{_V1_MARK}")),
        cache_bytes=max(0, cache),
        processes=read_number(f"{pids}/pids.current"),
        oom_kills=_pairs(f"{memory}/memory.oom_control").get("oom_kill", 0),
        pids_denied=_pairs(f"{pids}/pids.events").get("max", 0),
    )


def network_bytes(init_pid: int, network_mode: str) -> tuple[int | None, int | None]:
    """Return the bytes received and sent on all interfaces but the loopback. Both are None with the
    host's network, whose interfaces count what the whole machine has sent."""
    if network_mode == "none":
        return 0, 0
    if network_mode == "host" or _has_our_network(init_pid):
        return None, None
    received = sent = 0
    try:
        lines = file_content(f"/proc/{init_pid}/net/dev").splitlines()[2:]
    except OSError:
        return 0, 0
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received += int(fields[0])
            sent += int(fields[8])
    return received, sent


def _has_our_network(pid: int) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net"))
    except OSError:  # it is gone, or not ours to look at
        return False


def read_number(path: str) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return 0


def _pairs(path: str) -> dict[str, int]:
    words = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _text(path: str) -> str:
    """Read a file; empty when this kernel does not have it. The group itself must be there."""
    try:
        return file_content(path)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise
        return ""
    except OSError:
        # ENODEV: the group was removed between the open and the read.
        raise FileNotFoundError(path) from None


def file_content(path: str) -> str:
    """Read a file without a file object, which costs more than the reading: a service does this
    seven times after every program."""
    fd = os.open(path, os.O_RDONLY | open_flags("O_CLOEXEC"))
    try:
        content = piece = os.read(fd, 1 << 16)
        while len(piece) >= _WHOLE:
            piece = os.read(fd, 1 << 16)
            content += piece
    finally:
        os.close(fd)
    return content.decode("ascii", "replace")


def _write(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | open_flags("O_CLOEXEC"))
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
