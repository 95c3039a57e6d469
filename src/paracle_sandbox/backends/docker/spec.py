"""Build requests to the engine: pure functions from a configuration to a request body.

Hardened by construction. What is not named here is not given: no capability, no device, no host
namespace, no restart, no health check of the image's own, no log that could fill a disk.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from ...channel.bootstrap import BOOTSTRAP
from ...config import SandboxConfig
from ..machine.volumes import Volume
from ..machine.workspaces import UID

_MB = 1 << 20
_SHM_BYTES = 256 * _MB
_CPU_PERIOD = 100_000  # microseconds
# Writable beside the workspace and /tmp when the root need not be read-only: as on native.
_EXTRA_WRITABLE = ("home", "opt", "srv", "mnt")
# What the engines hide by themselves, which a list of our own replaces, and what more of /proc
# and /sys tells about the machine rather than about the sandbox.
_HIDDEN = (
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
    "/sys/devices/virtual/powercap",
    "/proc/kallsyms", "/proc/key-users", "/proc/config.gz", "/proc/cmdline", "/proc/partitions",
    "/proc/diskstats", "/proc/interrupts", "/proc/softirqs", "/proc/schedstat", "/proc/locks",
    "/proc/pressure", "/sys/kernel", "/sys/block", "/sys/bus", "/sys/class",
    "/sys/dev", "/sys/module", "/sys/devices/virtual/dmi", "/dev/mqueue",
)  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_ULIMITS = {
    # Not 0, which does not keep the kernel from starting a core_pattern program on the host.
    "core": (1, 1),
    "nofile": (1024, 4096),
    "memlock": (64 << 10, 64 << 10),
    "msgqueue": (0, 0),
    "nice": (0, 0),
    "rtprio": (0, 0),
}
_ENVIRONMENT = {
    "HOME": "/tmp",
    "USER": "paracle",
    "LOGNAME": "paracle",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Place:
    """Where a container's writable places come from, and what else is settled before it is made.

    ``home`` is a directory of the engine's machine, or None for tmpfs; ``probe`` is Python that
    runs before the guest; ``own_kernel`` is a runtime whose processes are not the host's;
    ``process_limit`` is named for an engine that would choose one by itself; ``image_volumes`` are
    the paths of image_volumes()."""

    home: str | None
    network: str
    seccomp: str
    runtime: str | None = None
    probe: str = ""
    own_kernel: bool = False
    process_limit: int | None = None
    volumes: Sequence[Volume] = ()
    image_volumes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def container_body(config: SandboxConfig, place: Place) -> dict[str, Any]:
    """Return the body of the engine's create request."""
    return {
        "Image": config.base_image,
        "Hostname": "sandbox",
        "User": f"{UID}:{UID}",
        "WorkingDir": "/",
        "Entrypoint": ["python3", "-I", "-c", place.probe + BOOTSTRAP, "0,1"],
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in _ENVIRONMENT.items()],
        "Labels": dict(place.labels),
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "Tty": False,
        "OpenStdin": True,
        # The end of our connection is the end of its stdin, and that is the guest's end.
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "HostConfig": _host_config(config, place),
    }


def _host_config(config: SandboxConfig, place: Place) -> dict[str, Any]:
    return {
        "AutoRemove": True,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "none", "Config": {}},
        **({"Runtime": place.runtime} if place.runtime else {}),
        "NetworkMode": place.network,
        # Without a network, the name servers of the host are nobody's business.
        **({"Dns": ["127.0.0.1"], "DnsSearch": ["."]} if place.network == "none" else {}),
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Privileged": False,
        "PublishAllPorts": False,
        "CapAdd": [],
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", f"seccomp={place.seccomp}"],
        "MaskedPaths": list(_HIDDEN),
        "ReadonlyPaths": list(_READ_ONLY),
        # Only what is in quota may be written; see _writable for read_only_filesystem=False.
        "ReadonlyRootfs": True,
        "Memory": config.memory_mb * _MB,
        "MemorySwap": config.memory_mb * _MB,
        # Not NanoCpus, of which an engine refuses more than its machine has.
        "CpuPeriod": _CPU_PERIOD,
        "CpuQuota": int(config.cpu_cores * _CPU_PERIOD),
        "PidsLimit": _pids_limit(config, place),
        "OomScoreAdj": 500,
        "ShmSize": _SHM_BYTES,
        "Ulimits": _ulimits(config, place),
        **_writable(config, place),
    }


def _pids_limit(config: SandboxConfig, place: Place) -> int:
    """Return the limit for the container's cgroup. A kernel of its own (gVisor) has threads of its
    own, up to two for each process inside: there this limit protects the host, and a ulimit keeps
    to what was asked for."""
    return 3 * config.max_processes + 256 if place.own_kernel else config.max_processes


def _ulimits(config: SandboxConfig, place: Place) -> list[dict[str, Any]]:
    limits = dict(_ULIMITS)
    if place.own_kernel:  # elsewhere it would count the user's processes in all containers
        limits["nproc"] = (config.max_processes, config.max_processes)
    elif place.process_limit is not None:
        limits["nproc"] = (place.process_limit, place.process_limit)
    return [{"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in limits.items()]


def image_volumes(image: Mapping[str, Any], config: SandboxConfig) -> tuple[str, ...]:
    """Return where the image wants volumes. Left to the engine, they would be writable without a
    limit."""
    wanted = (image.get("Config") or {}).get("Volumes") or {}
    paths = {posixpath.normpath(path) for path in wanted}
    given = {target.removesuffix(":rw").removesuffix(":ro") for target in config.volumes.values()}
    return tuple(sorted(paths - given - set(writable_places(config))))


def writable_places(config: SandboxConfig, image_volumes: Sequence[str] = ()) -> dict[str, str]:
    """Map each writable path inside to its name in the workspace of the sandbox."""
    places = {config.working_dir: "workspace", "/tmp": "tmp"}
    if not config.read_only_filesystem:
        places |= {f"/{name}": name for name in _EXTRA_WRITABLE}
    return places | dict(zip(image_volumes, volume_names(image_volumes), strict=True))


def volume_names(image_volumes: Sequence[str]) -> list[str]:
    return [f"volume-{number}" for number in range(len(image_volumes))]


def _writable(config: SandboxConfig, place: Place) -> dict[str, Any]:
    places = writable_places(config, place.image_volumes)
    given = [_bind(one.source, one.target, one.read_only) for one in place.volumes]
    if place.home is not None:
        own = [_bind(f"{place.home}/{name}", path) for path, name in places.items()]
        return {"Mounts": own + given}
    tmpfs = {path: _tmpfs(config, path) for path in places}
    return {"Mounts": given, "Tmpfs": tmpfs}


def _bind(source: str, target: str, read_only: bool = False) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": read_only,
        "BindOptions": {"Propagation": "rprivate"},
    }


def _tmpfs(config: SandboxConfig, path: str) -> str:
    mode = "1777" if path == "/tmp" else "0755"
    inodes = config.disk_mb * 128
    size = f"size={config.disk_mb}m,nr_inodes={inodes}"
    return f"rw,exec,nosuid,nodev,{size},mode={mode},uid={UID},gid={UID}"


def guest_setup(config: SandboxConfig) -> dict[str, Any]:
    """Return what the guest is told at boot. Programs have the environment that the image gives."""
    return {"working_dir": config.working_dir, "env": {}, "own_env": True}


def seccomp_path() -> str:
    """Return the path of the filter, for an engine that wants a file."""
    return str(resources.files(__package__).joinpath("seccomp.json"))


@cache
def seccomp_profile() -> str:
    """Return the policy of the native filter in the engines' format (``make seccomp`` writes
    it)."""
    text = resources.files(__package__).joinpath("seccomp.json").read_text(encoding="ascii")
    return json.dumps(json.loads(text), separators=(",", ":"))
