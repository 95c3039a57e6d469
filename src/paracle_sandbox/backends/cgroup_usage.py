"""What a sandbox uses, read from its cgroup; without one, from its processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .base import Usage

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CONTROLLERS = ("memory", "pids", "cpuacct", "cpu")
# What cgroup v1 shows where there is no limit is a little below 2**63.
_NO_LIMIT = 1 << 60
_ROOT = "/sys/fs/cgroup"
# What the link to a file that memfd_create made begins with.
_MEMORY_FILE = "/memfd:"
# The kernel hands these files out by the page, or the line if they are lists: less than half a page
# is all there is.
_WHOLE = _PAGE // 2


def read_usage(groups: Mapping[str, str], init_pid: int, *, networked: bool = True) -> Usage:
    """Raises FileNotFoundError when the sandbox is gone. One that is not ``networked`` has the
    loopback only, which does not count."""
    received, sent = _network(init_pid) if networked else (0, 0)
    if "unified" in groups:
        usage = _unified(groups["unified"])
    elif groups:
        usage = _separate(groups)
    else:
        usage = _processes(init_pid)
    return replace(usage, network_rx_bytes=received, network_tx_bytes=sent)


def cgroups_of(pid: int, container: str) -> dict[str, str]:
    """The cgroup directories of a container's first process; empty when they are not here.

    That the path names the container is the proof that the process is of this machine: the pid
    that an engine elsewhere tells may be anybody's here."""
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
    """What the kernel keeps of the limits of a sandbox: None where it keeps none."""

    memory_bytes: int | None
    cpu_cores: float | None
    processes: int | None


def read_limits(groups: Mapping[str, str]) -> KeptLimits:
    """Raises FileNotFoundError when the sandbox is gone."""
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
        cpu_seconds=_pairs(f"{group}/cpu.stat").get("usage_usec", 0) / 1e6,
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
    accounting = groups.get("cpuacct")
    return Usage(
        cpu_seconds=read_number(f"{accounting}/cpuacct.usage") / 1e9 if accounting else 0.0,
        memory_bytes=max(0, current - cache),
        memory_peak_bytes=max(current, read_number(f"{memory}/memory.max_usage_in_bytes")),
        cache_bytes=max(0, cache),
        processes=read_number(f"{pids}/pids.current"),
        oom_kills=_pairs(f"{memory}/memory.oom_control").get("oom_kill", 0),
        pids_denied=_pairs(f"{pids}/pids.events").get("max", 0),
    )


def _processes(init_pid: int) -> Usage:
    """Sum over the processes of the sandbox's pid namespace."""
    ticks = memory = shared = count = 0
    files: dict[tuple[int, int], int] = {}
    children = _children()
    waiting = [init_pid]
    if not Path(f"/proc/{init_pid}").exists():
        raise FileNotFoundError(f"/proc/{init_pid}")
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        fields = _stat(pid)
        if fields:
            count += int(fields[17])
            ticks += int(fields[11]) + int(fields[12])
            if pid == init_pid:
                ticks += int(fields[13]) + int(fields[14])
            own, in_common = _mapped(pid)
            memory += own
            shared += in_common
            files.update(_memory_files(pid))
    # What is shared may be mapped files of that kind, or not be files at all.
    memory += max(shared, sum(files.values()))
    return Usage(
        cpu_seconds=ticks / _TICKS,
        memory_bytes=memory,
        memory_peak_bytes=memory,
        processes=count,
    )


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields:
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _mapped(pid: int) -> tuple[int, int]:
    """The bytes that a process has mapped, of its own and of memory that it shares: its part."""
    try:
        words = [line.split() for line in _content(f"/proc/{pid}/smaps_rollup").splitlines()]
        parts = {word[0]: int(word[1]) << 10 for word in words if word[-1] == "kB"}
        return parts["Pss_Anon:"], parts["Pss_Shmem:"]
    except (OSError, KeyError):  # it is gone, or it is our guest, which lets nobody look
        return _unshared_pages(pid) * _PAGE, 0


def _unshared_pages(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return max(0, int(fields[1]) - int(fields[2]))


def _memory_files(pid: int) -> dict[tuple[int, int], int]:
    """The bytes of each open file that is in memory only, whether it is mapped or not."""
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path).startswith(_MEMORY_FILE):
                    about = os.stat(path)
                    found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return found


def _network(init_pid: int) -> tuple[int, int]:
    """Bytes received and sent, all interfaces but the loopback."""
    received = sent = 0
    try:
        lines = _content(f"/proc/{init_pid}/net/dev").splitlines()[2:]
    except OSError:
        return 0, 0
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received += int(fields[0])
            sent += int(fields[8])
    return received, sent


def read_number(path: str) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return 0


def _pairs(path: str) -> dict[str, int]:
    words = [line.split() for line in _text(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _text(path: str) -> str:
    """Empty for a file that this kernel does not have; the group itself must be there."""
    try:
        return _content(path)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise
        return ""
    except OSError:
        # ENODEV: the group was removed between the open and the read.
        raise FileNotFoundError(path) from None


def _content(path: str) -> str:
    """Without a file object, which costs more than the reading: this is done after every program
    that a service runs, seven times."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = piece = os.read(fd, 1 << 16)
        while len(piece) >= _WHOLE:
            piece = os.read(fd, 1 << 16)
            content += piece
    finally:
        os.close(fd)
    return content.decode("ascii", "replace")
