"""Run one program in a sandbox of its own, and tell how it went.

Like SandboxExecutor.execute_agent, with what only a command line needs: exact bytes as they
come, and an input that is still being written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SandboxError
from ..ids import new_sandbox_id
from ..monitor import SandboxMonitor
from ..sandbox import Sandbox
from . import streams

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..config import SandboxConfig
    from ..results import CommandResult, ExecutionResult, Stats

CODE_FILE = "agent_code.py"
INPUTS_FILE = "inputs.json"
_MONITOR_SECONDS = 0.5

OnOutput = Callable[[str, bytes], Awaitable[None] | None]


@dataclass(frozen=True)
class Program:
    """What to run, and with what."""

    source: bytes
    inputs: bytes | None = None
    args: Sequence[str] = ()
    stdin: int | None = None
    monitor: bool = True
    on_output: OnOutput | None = None


@dataclass(frozen=True)
class Outcome:
    """The result, and the error that stopped the program if one did."""

    result: ExecutionResult
    error: SandboxError | None = None


async def run_program(program: Program, config: SandboxConfig, backend: Backend) -> Outcome:
    """Raises SandboxError when there is no sandbox to run it in."""
    sandbox = Sandbox(backend, new_sandbox_id(), config, {"purpose": "cli"})
    async with sandbox:
        directory = config.working_dir
        if program.inputs is not None:
            await sandbox.write_file(f"{directory}/{INPUTS_FILE}", program.inputs)
        await sandbox.write_file(f"{directory}/{CODE_FILE}", program.source)
        started = time.monotonic()
        try:
            command, stats = await _watched(sandbox, program)
        except SandboxError as error:
            return await _stopped(sandbox, error, time.monotonic() - started)
        stats["duration_seconds"] = time.monotonic() - started
        return Outcome(_result(sandbox, command, stats))


async def _watched(sandbox: Sandbox, program: Program) -> tuple[CommandResult, Stats]:
    if not program.monitor:
        command = await _run(sandbox, program)
        return command, await sandbox.get_stats()
    async with SandboxMonitor(sandbox, _MONITOR_SECONDS) as monitor:
        command = await _run(sandbox, program)
    stats = monitor.get_latest() or await sandbox.get_stats()
    stats["monitoring"] = monitor.get_summary()
    return command, stats


async def _run(sandbox: Sandbox, program: Program) -> CommandResult:
    command = await sandbox.start_file(
        f"{sandbox.config.working_dir}/{CODE_FILE}",
        program.args,
        stdin=program.stdin is not None,
        on_output_bytes=program.on_output,
    )
    command.only_text()
    async with AsyncExitStack() as stack:
        stack.push_async_exit(command)
        if program.stdin is not None:
            streams.feed(command, program.stdin)
        return await command.wait()


def _result(sandbox: Sandbox, command: CommandResult, stats: Stats) -> ExecutionResult:
    result: ExecutionResult = {
        "success": command["exit_code"] == 0,
        "result": command,
        "stats": stats,
        "sandbox_id": sandbox.sandbox_id,
        "posture": sandbox.posture,
    }
    if not result["success"]:
        nothing_said = f"Execution failed with exit code {command['exit_code']}"
        result["error"] = command["stderr"] if command["stderr"].strip() else nothing_said
    return result


async def _stopped(sandbox: Sandbox, error: SandboxError, seconds: float) -> Outcome:
    from ..executor import error_result

    error.sandbox_id = error.sandbox_id or sandbox.sandbox_id
    result = error_result(error)
    result["posture"] = sandbox.posture
    try:
        stats = await asyncio.wait_for(sandbox.get_stats(), 1.0)
    except (SandboxError, TimeoutError):
        return Outcome(result, error)
    stats["duration_seconds"] = seconds
    result["stats"] = stats
    return Outcome(result, error)
