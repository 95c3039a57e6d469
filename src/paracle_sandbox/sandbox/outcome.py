"""Say what ended a command: which error it deserves, if any, and which limit it ran into.

A program that failed is a result; a program that we stopped is an exception, and so is a sandbox
that broke. What the kernel counted outweighs what we saw: a program that hangs because its child
was killed for memory ran out of memory, not of time.

The kernel's counters say which limit was reached, never an exit code: 137 may be a program's own
choice. They count for the whole sandbox, so a command compares them with what was seen before it
started; when memory runs out, every command that is running then is stopped and told. A full disk
has no count, only a state that outlasts its cause: a command that found it full must have said so
itself. The same holds for a command that could have no process, if others ended before it without
a look at what they used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..backends.base import Usage
from ..errors import ResourceLimitError, SandboxError, SandboxExecutionError, SandboxTimeoutError
from .output import Output, Printed

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


@dataclass(frozen=True)
class Stop:
    """Says why we stopped a command: one of these, or none of them when the user said so."""

    timed_out: bool = False
    breach: Breach | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Ending:
    """Everything that is known when a command has ended."""

    sandbox_id: str
    config: SandboxConfig
    timeout_seconds: float
    exit_code: int | None
    killed: bool = False
    stop: Stop | None = None
    lost: SandboxError | None = None
    usage: Usage | None = None
    before: Counts = field(default_factory=Counts)
    destroyed_because: str = ""
    output: Output = field(default_factory=lambda: Output(0))

    @property
    def _in_time(self) -> bool:
        """Whether it ended by itself, before the kill that its deadline sent could reach it."""
        return self.lost is None and not self.killed

    def error(self) -> BaseException | None:
        """Return what to raise, or None when the exit code is the whole story."""
        stop = self.stop
        if stop is not None and stop.error is not None:
            return stop.error
        if stop is not None and stop.breach is not None:
            return self._limit_error(stop.breach)
        if breach := self._breach():
            return self._limit_error(breach)
        if stop is None:
            return self._lost_error()
        if stop.timed_out and not self._in_time:
            return self._timeout()
        return None

    def _breach(self) -> Breach | None:
        if self.usage is None:
            return None
        if self.stop is not None:
            return memory_breach(self.usage, self.before, self.config)
        failed = self.lost is not None or self.exit_code != 0
        return verdict(self.usage, self.before, self.config, failed, self.output)

    def _limit_error(self, breach: Breach) -> ResourceLimitError:
        stdout, stderr = self.output.printed("stdout"), self.output.printed("stderr")
        return breach.error(self.sandbox_id, stdout, stderr)

    def _timeout(self) -> SandboxTimeoutError:
        message = f"Execution timed out after {self.timeout_seconds:g} seconds"
        if self.destroyed_because:
            message += f"; the sandbox was destroyed because {self.destroyed_because}"
        return SandboxTimeoutError(
            message,
            self.sandbox_id,
            self.timeout_seconds,
            stdout=self.output.printed("stdout"),
            stderr=self.output.printed("stderr"),
        )

    def _lost_error(self) -> SandboxError | None:
        if not isinstance(self.lost, SandboxExecutionError):
            return self.lost
        message = str(self.lost)
        if message.startswith("The sandbox "):
            message += " while the program ran"
        return SandboxExecutionError(
            message,
            self.sandbox_id,
            stdout=self.output.printed("stdout"),
            stderr=self.output.printed("stderr"),
        )


def memory_breach(usage: Usage, before: Counts, config: SandboxConfig) -> Breach | None:
    """Return a breach if the kernel has killed something for want of memory since ``before``; or,
    where it keeps no such limit, if the sandbox was seen above it."""
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
    """Return the limit that a command which has ended ran into. Only memory outweighs a success."""
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
    """Say whether the last that a command printed is that nothing more can be stored."""
    return _complains(output, _NO_ROOM)


def _complains(output: Output | None, words: bytes) -> bool:
    if output is None:  # it was not kept
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
