"""What the owner tells a spawner: pure functions from a configuration to messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import SandboxConfig

_MB = 1 << 20


def create_request(config: SandboxConfig, posture: Mapping[str, Any]) -> dict[str, Any]:
    """What the spawner must know, and no more: its memory is in every later sandbox."""
    shape = {
        "network": config.network_mode,
        "working_dir": config.working_dir,
        "read_only": config.read_only_filesystem,
        "tmpfs_mb": 0 if posture["volume"] else config.disk_mb,
        "resolv_conf": "" if config.network_mode == "none" else resolv_conf(),
    }
    limits = {
        "memory_bytes": config.memory_mb * _MB,
        "cpu_cores": config.cpu_cores,
        "max_processes": config.max_processes,
    }
    return {"shape": shape, "limits": limits, "disk_bytes": config.disk_mb * _MB}


def failpoints(names: tuple[str, ...]) -> dict[str, str]:
    """``step`` makes a step fail; ``step=kill-owner`` kills the owner there."""
    pairs = (name.partition("=") for name in names)
    return {step.strip(): action.strip() or "fail" for step, _, action in pairs}


def base_env() -> dict[str, str]:
    """All that a program inside sees of an environment, before the caller's own variables."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "HOME": "/tmp",
        "USER": "paracle",
        "LOGNAME": "paracle",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }


def resolv_conf() -> str:
    """The host's name servers, or what stands behind its local stub, which cannot be reached."""
    for path in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        if "nameserver 127." not in text and "nameserver ::1" not in text:
            return text
    return "# no name server that a sandbox can reach\n"


def missing_limits(posture: dict[str, Any]) -> list[str]:
    """What a spawner could not have on this machine, by the names that health has for it."""
    groups = [] if posture["cgroup_version"] else ["memory limit", "cpu limit"]
    return groups if posture["volume"] else [*groups, "disk limit apart from memory"]
