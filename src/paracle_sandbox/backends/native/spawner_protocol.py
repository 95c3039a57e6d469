"""The messages of the owner to a spawner: pure functions of a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...config import SandboxConfig
from ...settings import Settings
from .spawner_process import default_python
from .template_kinds import Template

_MB = 1 << 20


def spawner_options(
    settings: Settings, template: Template, first: SandboxConfig | None
) -> dict[str, Any]:
    """Build the options of a spawner. ``first``: the sandbox that it is started for, which
    it makes while its owner goes on."""
    posture = {"volume": os.geteuid() == 0}  # as far as one can know before
    usual = create_request(SandboxConfig(), posture)
    off = settings.speed_off
    return {
        "state_dir": str(settings.state_dir),
        "data_dir": str(settings.data_dir),
        "template_dir": str(template.path) if template.path else None,
        "modules": list(template.modules),
        "idle_modules": list(template.idle_modules),
        "uid_base": settings.uid_base,
        "stock": 0 if "warm-pool" in off else settings.stock,
        "stock_shape": usual.pop("shape"),
        "stock_grant": usual,
        "first": create_request(first, posture) if first else None,
        "keep_alive": "keep-alive" not in off,
        "failpoints": failpoints(settings.failpoints),
        "setup": {
            "env": base_env(),
            "python": settings.python or default_python(),
            "preforked": "preforked" not in off,
            "fork_server": "fork-server" not in off,
        },
    }


def create_request(config: SandboxConfig, posture: Mapping[str, Any]) -> dict[str, Any]:
    """Build a request with what the spawner must know, and no more."""
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
    """The environment of programs inside, before the caller's own variables."""
    return {
        # The commands of the template's packages (jail.root.COMMANDS), and of those that a program
        # installs for itself: before the host's, which belong to the host's own Python.
        "PATH": "/template/bin:/usr/local/bin:/tmp/.local/bin:"
        "/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",  # what pip writes to is the sandbox's own
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
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        if "nameserver 127." not in text and "nameserver ::1" not in text:
            return text
    return "# no name server that a sandbox can reach\n"


def missing_layers(posture: dict[str, Any]) -> list[str]:
    """List what a spawner could not have on this machine, by the names that health has for it."""
    found = [] if posture["cgroup_version"] else ["memory limit", "cpu limit"]
    if not posture["volume"]:
        found.append("disk limit apart from memory")
    return found if posture["landlock"] else [*found, "landlock"]
