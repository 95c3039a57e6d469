"""The end of a command: which error it deserves, if any.

A program that failed is a result; a program that we stopped is an exception, and so is a place
that broke. What the kernel counted outweighs what we saw: a program that hangs because its
child was killed for memory ran out of memory, not of time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..backends.base import Usage
from ..errors import ResourceLimitError, SandboxError, SandboxExecutionError, SandboxTimeoutError
from .limits import Breach, Counts, memory_breach, verdict
from .output import Output

if TYPE_CHECKING:
    from ..config import SandboxConfig


@dataclass(frozen=True)
class Stop:
    """Why we stopped a command: one of these, or none of them when the user said so."""

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
        """It ended by itself, before the kill that its deadline sent could reach it."""
        return self.lost is None and not self.killed

    def error(self) -> BaseException | None:
        """What to raise, or None when the exit code is the whole story."""
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
