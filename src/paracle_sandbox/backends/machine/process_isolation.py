"""Read from outside what the kernel says about the processes of a sandbox."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


@dataclass(frozen=True)
class Posture:
    """How one thread is confined."""

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: tuple[int, ...]
    no_new_privs: int
    seccomp: int
    own_namespaces: frozenset[str]

    @property
    def has_capabilities(self) -> bool:
        return any(self.capabilities)


def read_posture(pid: int, thread: int | None = None) -> Posture:
    """Read how one thread (the first by default) is confined. Raises OSError when it is gone."""
    base = Path(f"/proc/{pid}/task/{thread or pid}")
    status = _status(base / "status")
    return Posture(
        uids=_numbers(status["Uid"]),
        gids=_numbers(status["Gid"]),
        groups=_numbers(status["Groups"]),
        capabilities=tuple(int(status[name], 16) for name in _CAPABILITIES),
        no_new_privs=int(status["NoNewPrivs"]),
        seccomp=int(status["Seccomp"]),
        own_namespaces=frozenset(n for n in NAMESPACES if _is_own(base, n)),
    )


def processes(init_pid: int) -> list[int]:
    """List every process of the pid namespace whose first process is ``init_pid``."""
    namespace = _namespace(Path(f"/proc/{init_pid}"), "pid")
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and _namespace(Path(f"/proc/{name}"), "pid") == namespace
    ]


def threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _status(path: Path) -> dict[str, str]:
    lines = path.read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


def _namespace(base: Path, name: str) -> str | None:
    try:
        return os.readlink(base / "ns" / name)
    except OSError:
        return None


def _is_own(base: Path, name: str) -> bool:
    """Whether a namespace is not ours. One that we may not look at is not ours either."""
    theirs = _namespace(base, name)
    return theirs != _namespace(Path("/proc/self"), name)
