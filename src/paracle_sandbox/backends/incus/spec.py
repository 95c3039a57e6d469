"""Build requests to the server: pure functions from a configuration to request bodies.

No profile of the user's is used, so nothing is given that is not named here: the root disk, the
disk of the workspace, and one filtered network card if that was asked for. What runs first is not
the image's own init, with its services and its network, but a program that sleeps; the guest comes
over an exec, as root of the instance, and jail/instance/confine_instance.py takes it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...channel.bootstrap import bootstrap_as_root
from ...config import SandboxConfig

CONTAINER, MACHINE = "container", "virtual-machine"
HOME = "/.paracle"
WORKSPACE, NIC, ROOT = "workspace", "eth0", "root"
# What runs in a container beside the guest: the sleeper, the attached process and the porter.
OWN_PROCESSES = 3
_SLEEPER = "lxc.init.cmd = /bin/sleep 2147483647"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/tmp/.local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "USER": "paracle",
    "LOGNAME": "paracle",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Nic:
    """A network card: on which network, under which address, and how it gets out."""

    device: Mapping[str, str]
    address: str
    netmask: str
    gateway: str
    refused: tuple[str, ...]
    resolv_conf: str


@dataclass(frozen=True)
class Place:
    """The decisions before an instance is made. ``home`` is a device, or None for memory."""

    kind: str
    pool: str
    home: Mapping[str, str] | None = None
    nic: Nic | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


def instance_body(
    name: str, source: Mapping[str, Any], place: Place, config: SandboxConfig | None = None
) -> dict[str, Any]:
    """Return the body of POST /1.0/instances: stopped, and removed once it has run. Without
    ``config`` it is a ready instance, which no sandbox has yet."""
    change = sandbox_change(config, place) if config is not None else _root_disk(place)
    return {
        "name": name,
        "type": place.kind,
        "ephemeral": True,
        "profiles": [],
        "source": dict(source),
        "config": {
            **_fixed_config(place),
            **place.keys,
            **change.get("config", {}),
        },
        "devices": change["devices"],
    }


def _root_disk(place: Place) -> dict[str, Any]:
    return {"devices": {ROOT: {"type": "disk", "path": "/", "pool": place.pool}}}


def sandbox_change(config: SandboxConfig, place: Place) -> dict[str, Any]:
    """Return the body of the PATCH that turns an instance into one particular sandbox."""
    devices = dict(_root_disk(place)["devices"])
    if place.home is not None:
        devices[WORKSPACE] = {"type": "disk", "path": HOME, **place.home}
        if place.kind == CONTAINER and "pool" not in place.home:
            devices[WORKSPACE]["shift"] = "true"  # a folder of the host's, in the instance's ids
    if place.nic is not None:
        devices[NIC] = dict(place.nic.device)
    return {"config": {**_limits(config, place), **place.keys}, "devices": devices}


def _fixed_config(place: Place) -> dict[str, str]:
    shared = {"boot.autostart": "false"}
    if place.kind == MACHINE:
        # Few images are signed, and what boots here is not trusted anyway.
        return {**shared, "security.secureboot": "false", "security.guestapi": "false"}
    return {
        **shared,
        "security.privileged": "false",
        "security.nesting": "false",
        "security.guestapi": "false",
        "security.idmap.isolated": "true",
        "raw.lxc": _SLEEPER,
    }


def _limits(config: SandboxConfig, place: Place) -> dict[str, str]:
    memory = {"limits.memory": f"{config.memory_mb}MiB"}
    if place.kind == MACHINE:
        return {**memory, "limits.cpu": str(math.ceil(config.cpu_cores))}
    return {
        **memory,
        "limits.memory.enforce": "hard",
        "limits.memory.swap": "false",
        "limits.cpu.allowance": f"{max(1, round(config.cpu_cores * 100))}ms/100ms",
        "limits.processes": str(config.max_processes + OWN_PROCESSES),
    }


def state_change(action: str) -> dict[str, Any]:
    return {"action": action, "force": True, "timeout": -1, "stateful": False}


def exec_body() -> dict[str, Any]:
    """Return the body of an exec: as root of the instance, with separate streams and none of our
    environment."""
    return command_body(["python3", "-I", "-c", bootstrap_as_root(), "0,1"])


def command_body(command: list[str]) -> dict[str, Any]:
    return {
        "command": command,
        "environment": {**_ENVIRONMENT, "HOME": "/root", "USER": "root", "LOGNAME": "root"},
        "wait-for-websocket": True,
        "interactive": False,
        "user": 0,
        "group": 0,
        "cwd": "/",
    }


def guest_setup(config: SandboxConfig) -> dict[str, Any]:
    return {"working_dir": config.working_dir, "env": dict(_ENVIRONMENT)}


def confinement(config: SandboxConfig, place: Place) -> dict[str, Any]:
    """Return the plan for jail/instance/confine_instance.py."""
    plan: dict[str, Any] = {
        "working_dir": config.working_dir,
        "read_only": config.read_only_filesystem,
        "tmpfs_mb": 0 if place.home is not None else config.disk_mb,
        "resolv_conf": place.nic.resolv_conf if place.nic else "",
        # A machine's kernel has no cgroup of ours.
        "max_processes": config.max_processes if place.kind == MACHINE else 0,
    }
    if place.nic is not None:
        nic = place.nic
        plan |= {"address": nic.address, "netmask": nic.netmask, "gateway": nic.gateway}
        plan["refused"] = list(nic.refused)
    return plan
