"""The verdict: which limit, if any, a command has run into.

The kernel's counters say it, never an exit code: 137 may be a program's own choice. They count
for the whole sandbox, so a command compares them with what was seen before it started; when
memory runs out, every command that is running then is stopped and told. A full disk has no count,
only a state that outlasts its cause: a command that found it full must have said so itself. So must
one that had no process to be had, if others ended before it that nobody looked after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..backends.base import Usage
from ..errors import ResourceLimitError
from ..printed import Printed
from .output import Output

if TYPE_CHECKING:
    from ..config import SandboxConfig

MIB = 1 << 20
# Of the memory limit: above this, check_limits() complains.
MEMORY_ALARM = 0.95
# What programs print when no more can be stored.
_NO_ROOM = rb"(?i)no space left on device|disk quota exceeded|disk is full|ENOSPC|EDQUOT"
# And when no process or thread can be had.
_NO_PROCESS = (
    rb"(?i)resource temporarily unavailable|can('t|not) fork|new thread|EAGAIN|pthread_create"
)


@dataclass(frozen=True)
class Counts:
    """The kernel's counts of limits that were reached, at some moment."""

    oom_kills: int = 0
    pids_denied: int = 0
    disk_full: bool = False
    stale: bool = False  # commands have ended since then

    def raised_to(self, usage: Usage) -> Counts:
        return Counts(
            max(self.oom_kills, usage.oom_kills),
            max(self.pids_denied, usage.pids_denied),
            usage.disk_full,
        )


@dataclass(frozen=True)
class Breach:
    """A limit that was reached."""

    message: str
    resource_type: str
    limit: float
    usage: float

    def error(
        self, sandbox_id: str, stdout: str | Printed = "", stderr: str | Printed = ""
    ) -> ResourceLimitError:
        return ResourceLimitError(
            self.message,
            sandbox_id,
            self.resource_type,
            limit=self.limit,
            usage=self.usage,
            stdout=stdout,
            stderr=stderr,
        )


def memory_breach(usage: Usage, before: Counts, config: SandboxConfig) -> Breach | None:
    """The kernel has killed something for want of memory since ``before``; or, where it keeps
    no such limit, the sandbox was seen above it."""
    if usage.incomplete:
        return incomplete_breach(usage, config)
    limit = config.memory_mb * MIB
    killed = usage.oom_kills > before.oom_kills
    if not killed and usage.memory_bytes <= limit:
        return None
    return Breach(
        f"Memory limit exceeded: the sandbox may use {config.memory_mb} MB"
        + (" (OOM killed)" if killed else ""),
        "memory",
        limit=limit,
        usage=max(usage.memory_peak_bytes, usage.memory_bytes),
    )


def incomplete_breach(usage: Usage, config: SandboxConfig) -> Breach:
    """A sandbox that cannot be looked through could have any amount of memory."""
    return Breach(
        f"Process limit exceeded: {usage.incomplete}, so its memory limit cannot be kept. Use "
        "fewer processes and open files, or run as root, where the kernel keeps the limits",
        "pids",
        limit=config.max_processes,
        usage=usage.processes,
    )


def verdict(
    usage: Usage, before: Counts, config: SandboxConfig, failed: bool, output: Output | None = None
) -> Breach | None:
    """The limit that a command which has ended ran into. Only memory outweighs a success."""
    breach = memory_breach(usage, before, config)
    if breach is not None or not failed:
        return breach
    denied = usage.pids_denied > before.pids_denied
    if denied and (not before.stale or _complains(output, _NO_PROCESS)):
        return Breach(
            f"Process limit exceeded: the sandbox may have {config.max_processes} processes",
            "pids",
            limit=config.max_processes,
            usage=max(usage.processes, config.max_processes),
        )
    if before.disk_full and not complains_of_disk(output):
        return None
    return disk_breach(usage, config)


def complains_of_disk(output: Output | None) -> bool:
    """Whether the last that a command printed says that nothing more can be stored."""
    return _complains(output, _NO_ROOM)


def _complains(output: Output | None, words: bytes) -> bool:
    if output is None:  # nobody kept it
        return False
    return any(re.search(words, output.last_words(name)) for name in ("stdout", "stderr"))


def disk_breach(usage: Usage, config: SandboxConfig) -> Breach | None:
    if not usage.disk_full:
        return None
    return Breach(
        f"Disk limit exceeded: the sandbox may store {config.disk_mb} MB",
        "disk",
        limit=config.disk_mb * MIB,
        usage=usage.disk_bytes,
    )


def memory_alarm(usage: Usage, config: SandboxConfig) -> Breach | None:
    """Memory use so close to the limit that the next allocation may be the last."""
    if usage.incomplete:
        return incomplete_breach(usage, config)
    limit = config.memory_mb * MIB
    if usage.memory_bytes <= limit * MEMORY_ALARM:
        return None
    return Breach(
        f"Memory limit nearly reached: {usage.memory_bytes // MIB} of {config.memory_mb} MB",
        "memory",
        limit=limit,
        usage=usage.memory_bytes,
    )


def output_breach(size: int, limit: int) -> Breach:
    return Breach("Output limit exceeded", "output", limit=limit, usage=size)
