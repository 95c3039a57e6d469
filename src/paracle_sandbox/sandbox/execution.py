"""Run one program in a sandbox and make its result: the one place where results are built.

``execute`` awaits any program, samples the sandbox meanwhile if it is asked to, and returns the
ExecutionResult. ``execute_source`` does that for Python source. ``execution_result`` builds the
result of a program that ended, ``error_result`` that of an error: library, command line, service,
MCP and tools take these, so that a field means the same everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Unpack

from ..errors import (
    ResourceLimitError,
    SandboxError,
    SandboxExecutionError,
    SandboxTimeoutError,
    StoppedError,
)
from ..host.platforms import SIGKILL
from .monitor import SandboxMonitor

if TYPE_CHECKING:
    from ..results import CommandResult, ExecutionResult, JobResult, Stats
    from .command_options import CommandOptions
    from .sandbox import Sandbox

logger = logging.getLogger(__name__)

# What a program without a file of its own is called inside, and where it finds its inputs.
CODE_FILE = "agent_code.py"
INPUTS_FILE = "inputs.json"
MONITOR_INTERVAL_SECONDS = 0.5


async def execute_source(
    sandbox: Sandbox,
    source: bytes,
    args: Sequence[str] = (),
    *,
    name: str = CODE_FILE,
    inputs: bytes | None = None,
    monitor: bool = False,
    timeout: float | None = None,
    **options: Unpack[CommandOptions],
) -> ExecutionResult:
    """Run Python source to its end, as the file ``name`` of the working directory.

    ``inputs`` is the content of inputs.json beside it. Raises as Sandbox.run_file() does.
    """
    if inputs is not None:
        await sandbox.write_file(f"{sandbox.config.working_dir}/{INPUTS_FILE}", inputs)
    await sandbox.wait_for_packages(source)

    async def run() -> CommandResult:
        return await sandbox.commands.run_source(name, source, args, timeout, **options)

    return await execute(sandbox, run, monitor=monitor)


async def execute(
    sandbox: Sandbox, run: Callable[[], Awaitable[CommandResult]], *, monitor: bool = False
) -> ExecutionResult:
    """Await ``run``, which runs a program of the sandbox to its end, and return the result.

    Raises what ``run`` raises; error_result() makes a result of that, too.
    """
    started = time.monotonic()
    command, stats = await (_run_monitored if monitor else _run_plain)(sandbox, run)
    stats["duration_seconds"] = time.monotonic() - started
    return execution_result(sandbox, command, stats)


def execution_result(sandbox: Sandbox, command: CommandResult, stats: Stats) -> ExecutionResult:
    """Build the result of a program that ended by itself."""
    result: ExecutionResult = {
        "success": command["exit_code"] == 0,
        "result": command,
        "stats": stats,
        "sandbox_id": sandbox.sandbox_id,
        "posture": sandbox.posture,
    }
    if not result["success"]:
        result["error"] = failure_text(command["exit_code"], command["stderr"])
    return result


def failure_text(exit_code: int, stderr: str) -> str:
    """Return what a failed program said, or its exit code if it said nothing."""
    return stderr if stderr.strip() else f"Execution failed with exit code {exit_code}"


def error_result(error: Exception, job_index: int | None = None) -> JobResult:
    """Build the result of an exception, with what the program had printed until it was stopped."""
    result: JobResult = {
        "success": False,
        "sandbox_id": error.sandbox_id if isinstance(error, SandboxError) else None,
        "error": str(error) or type(error).__name__,
        "error_type": type(error).__name__,
    }
    if isinstance(error, StoppedError):
        result["result"] = _partial_result(error)
    if job_index is not None:
        result["job_index"] = job_index
    return result


def _partial_result(error: StoppedError) -> CommandResult:
    exit_code = error.exit_code if isinstance(error, SandboxExecutionError) else None
    return {
        "exit_code": -SIGKILL if exit_code is None else exit_code,
        "stdout": error.stdout,
        "stderr": error.stderr,
        "timed_out": isinstance(error, SandboxTimeoutError),
        "truncated": isinstance(error, ResourceLimitError) and error.resource_type == "output",
    }


async def _run_plain(
    sandbox: Sandbox, run: Callable[[], Awaitable[CommandResult]]
) -> tuple[CommandResult, Stats]:
    command = await run()
    return command, await stats_or_zeros(sandbox)


async def _run_monitored(
    sandbox: Sandbox, run: Callable[[], Awaitable[CommandResult]]
) -> tuple[CommandResult, Stats]:
    async with SandboxMonitor(sandbox, MONITOR_INTERVAL_SECONDS) as monitor:
        command = await run()
    stats = monitor.get_latest() or await stats_or_zeros(sandbox)
    stats["monitoring"] = monitor.get_summary()
    return command, stats


async def stats_or_zeros(sandbox: Sandbox) -> Stats:
    """Return what the sandbox used. A program that ran well stays a success when that cannot be
    read: then the figures are zeros, and the log says why."""
    try:
        return await sandbox.get_stats()
    except SandboxError as error:
        logger.warning("No stats of sandbox %s: %s", sandbox.sandbox_id, error)
        return {
            "cpu_percent": 0.0, "cpu_seconds": 0.0, "memory_bytes": 0, "memory_mb": 0.0,
            "memory_percent": 0.0, "memory_limit_mb": sandbox.config.memory_mb,
            "memory_peak_mb": 0.0, "disk_mb": 0.0, "disk_limit_mb": sandbox.config.disk_mb,
            "processes": 0, "network_rx_bytes": 0, "network_tx_bytes": 0, "duration_seconds": 0.0,
        }  # fmt: skip
