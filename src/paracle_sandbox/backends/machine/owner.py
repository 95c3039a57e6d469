"""Write the maker of a sandbox as a text that any process of any machine can judge.

A pid alone is not enough: it is recycled, it means another process in another pid namespace, and an
engine may be shared by several machines. An owner that cannot be judged from here counts as alive:
what is not known to be dead is never touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_UNKNOWN = "-"


@dataclass(frozen=True)
class Owner:
    """A process: its machine, boot, pid namespace, number and start time."""

    machine: str
    boot: str
    namespace: str
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(
            machine=_text("/etc/machine-id"),
            boot=_text("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace(),
            pid=pid,
            start=start_time(pid) or 0,
        )

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        parts = text.split("/")
        if len(parts) != 5 or not (parts[3].isdecimal() and parts[4].isdecimal()):
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]))

    def __str__(self) -> str:
        return f"{self.machine}/{self.boot}/{self.namespace}/{self.pid}/{self.start}"

    @property
    def is_alive(self) -> bool:
        """Whether the owner is alive. False only where it is certain that it is not."""
        if self.boot == _UNKNOWN:  # of a system without /proc: another one like it, or this one
            return True
        here = Owner.of(self.pid)
        if (self.machine, self.boot) != (here.machine, here.boot):
            # Another boot of this machine, or another machine altogether.
            return self.machine != here.machine or self.machine == _UNKNOWN
        if self.namespace != here.namespace:
            return True
        return self.start == here.start if here.start else _exists(self.pid)


def _exists(pid: int) -> bool:
    """Whether there is such a process. One that may not be looked at counts as there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip() or _UNKNOWN
    except OSError:
        return _UNKNOWN


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return _UNKNOWN


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return _text("/proc/sys/kernel/random/boot_id")


def pid_namespace() -> str:
    """Return the pid namespace in which the pids that we see are valid."""
    return _namespace()


def start_time(pid: int) -> int | None:
    """Return the start time in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
