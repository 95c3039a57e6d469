"""Run one program in a sandbox, and tell how it went.

Like SandboxExecutor.execute_agent, with what only a command line needs: exact bytes as they
come, an input that is still being written, a terminal, and files that go in before and come out
after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..errors import SandboxError
from ..ids import new_sandbox_id
from ..sandbox.execution import CODE_FILE, INPUTS_FILE, error_result, execute
from ..sandbox.sandbox import Sandbox
from . import stdio

if TYPE_CHECKING:
    from ..backends.base import Backend
    from ..config import SandboxConfig
    from ..results import CommandResult, JobResult
    from ..sandbox.command import Command
    from ..sandbox.command_options import CommandOptions
    from .tty import OwnTerminal

OnOutput = Callable[[str, bytes], Awaitable[None] | None]


@dataclass(frozen=True)
class Outcome:
    """The result, and the error that stopped the program if one did."""

    result: JobResult
    error: SandboxError | None = None


@dataclass(frozen=True)
class Program:
    """The program, and what it gets: a ``command`` (a str is one for the shell), or else Python
    ``code``, or else the file at ``path`` in the working directory, with ``source`` as its content
    if it is not there yet. ``before`` and ``after`` are awaited around it in the same sandbox."""

    source: bytes | None = None
    path: str = CODE_FILE
    code: str | None = None
    command: str | Sequence[str] | None = None
    inputs: bytes | None = None
    args: Sequence[str] = ()
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: int | None = None
    terminal: OwnTerminal | None = None
    monitor: bool = True
    timeout: float | None = None
    on_output: OnOutput | None = None
    before: Callable[[Sandbox], Awaitable[None]] | None = None
    after: Callable[[Sandbox, Outcome], Awaitable[None]] | None = None


async def run_program(program: Program, config: SandboxConfig, backend: Backend) -> Outcome:
    """Raises SandboxError when there is no sandbox to run it in."""
    sandbox = Sandbox(backend, new_sandbox_id(), config, {"purpose": "cli"})
    async with sandbox:
        if program.before is not None:
            await program.before(sandbox)
        if program.inputs is not None:
            await sandbox.write_file(f"{config.working_dir}/{INPUTS_FILE}", program.inputs)
        if program.source is not None:
            await sandbox.wait_for_packages(program.source)
        outcome = await _outcome(sandbox, program)
        if program.after is not None:
            await program.after(sandbox, outcome)
        return outcome


async def _outcome(sandbox: Sandbox, program: Program) -> Outcome:
    started = time.monotonic()
    try:
        result = await execute(sandbox, lambda: _run(sandbox, program), monitor=program.monitor)
    except SandboxError as error:
        return await _stopped(sandbox, error, time.monotonic() - started)
    return Outcome(cast("JobResult", result))


async def _run(sandbox: Sandbox, program: Program) -> CommandResult:
    with ExitStack() as terminals:
        if program.terminal is not None:
            terminals.enter_context(program.terminal)
        return await run_command(sandbox, program)


async def run_command(sandbox: Sandbox, program: Program) -> CommandResult:
    """Start it, feed it, and wait for its end."""
    terminal = program.terminal
    options: CommandOptions = {
        "stdin": program.stdin is not None,
        "on_output_bytes": program.on_output,
    }
    if program.cwd is not None:
        options["cwd"] = program.cwd
    if program.env:
        options["env"] = program.env
    if terminal is not None:
        options["pty"] = terminal.size
    command = await _start(sandbox, program, options)
    command.only_text()
    async with AsyncExitStack() as stack:
        stack.push_async_exit(command)
        if terminal is not None:
            terminal.follow_size(command)
        if program.stdin is not None:
            stdio.feed(command, program.stdin, terminal.watch if terminal else None)
        return await command.wait()


async def _start(sandbox: Sandbox, program: Program, options: CommandOptions) -> Command:
    if program.command is not None:
        return await sandbox.start_command(program.command, timeout=program.timeout, **options)
    if program.code is not None:
        return await sandbox.start_code(program.code, program.args, **options)
    if program.source is not None:
        return await sandbox.commands.start_source(
            program.path, program.source, program.args, **options
        )
    path = f"{sandbox.config.working_dir}/{program.path}"
    return await sandbox.start_file(path, program.args, **options)


async def _stopped(sandbox: Sandbox, error: SandboxError, seconds: float) -> Outcome:
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
