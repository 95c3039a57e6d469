"""The shapes of what comes back: plain dicts, the same in Python, REST, MCP and ``--output``."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class CommandResult(TypedDict):
    """Says what one program did. ``exit_code`` is -N when signal N ended it."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool


class Stats(TypedDict):
    """Says what a sandbox uses now. CPU in percent of one core; memory, and its peak, without page
    cache. The network is None where it is the host's, whose figures are the whole machine's."""

    cpu_percent: float
    cpu_seconds: float
    memory_bytes: int
    memory_mb: float
    memory_percent: float
    memory_limit_mb: int
    memory_peak_mb: float
    disk_mb: float
    disk_limit_mb: int
    processes: int
    network_rx_bytes: int | None
    network_tx_bytes: int | None
    duration_seconds: float
    monitoring: NotRequired[Monitoring]


class Averages(TypedDict):
    """One value each for CPU and memory, over the samples of a monitor."""

    cpu_percent: float
    memory_percent: float
    memory_mb: float


class Monitoring(TypedDict):
    """Sums up what a monitor saw."""

    averages: Averages
    peaks: Averages
    history_samples: int


class Isolation(TypedDict):
    """Says what kept a program in: the backend, and which layers it does without on this machine,
    by the names that ``paracle sandbox health`` has for them."""

    backend: str
    missing: list[str]


class ExecutionResult(TypedDict):
    """The answer of run() and execute_agent(): a program that ran to its end."""

    success: bool
    sandbox_id: str
    posture: Isolation
    result: CommandResult
    stats: Stats
    error: NotRequired[str]


class JobResult(TypedDict):
    """The answer for one job of a batch, and what ``--output`` holds: the program may have been
    stopped, or never have started."""

    success: bool
    sandbox_id: str | None
    posture: NotRequired[Isolation]
    result: NotRequired[CommandResult]
    stats: NotRequired[Stats]
    error: NotRequired[str]
    error_type: NotRequired[str]
    job_index: NotRequired[int]


class FileInfo(TypedDict):
    """One file or directory inside a sandbox. ``kind`` is file, directory, link or other."""

    name: str
    path: str
    kind: str
    size: int
    mode: int
    modified: float
