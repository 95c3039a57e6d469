"""Programs of users: takes a quota, then the sandbox, runs the program, keeps the files, logs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...backends.base import Usage
from ...errors import SandboxError, StoppedError
from ...sandbox.command import Command
from ...sandbox.command_options import CommandOptions
from ...sandbox.execution import error_result
from ...sandbox.outcome import MIB
from ...sandbox.sandbox import Sandbox
from ..errors import PathHider, classify
from ..journal import Journal
from ..metrics import Metrics
from ..schemas import RunRequest
from .kept_files import Listed
from .lost_sandboxes import Loss
from .quotas import Executions
from .spool import Spool
from .user_sandboxes import UserSandbox, UserSandboxes

logger = logging.getLogger(__name__)

# How much of a program's output an answer has; streams have no such limit.
MAX_OUTPUT = 2 << 20

Chunk = tuple[str, bytes]


@dataclass(frozen=True)
class Program:
    """A program that a request wants to run, and how."""

    kind: str
    text: str
    timeout: float
    options: CommandOptions = field(default_factory=lambda: CommandOptions())
    args: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: RunRequest) -> Program:
        options: CommandOptions = {"env": request.env, "cwd": request.cwd}
        if request.keep_stdin:
            options["stdin"] = True
        elif request.stdin is not None:
            options["stdin"] = request.stdin
        if request.code is not None:
            return cls("python", request.code, request.timeout, options)
        return cls("shell", request.command or "", request.timeout, options)

    async def start(self, sandbox: Sandbox, **more: Any) -> Command:
        options: CommandOptions = {**self.options, **more}  # type: ignore[typeddict-item]
        if self.kind == "python":
            return await sandbox.start_code(self.text, self.args, timeout=self.timeout, **options)
        return await sandbox.start_command(self.text, timeout=self.timeout, **options)


@dataclass
class Run:
    """A program under way, or ended."""

    owned: UserSandbox
    command: Command
    saves: int
    takes_input: bool = False
    command_id: str = field(default_factory=lambda: secrets.token_hex(16))
    started_at: float = field(default_factory=time.time)
    loss: Loss | None = None
    files_kept: bool | None = None  # None until they were saved
    before: Usage | None = None
    alone_at: int | None = None
    chunks: AsyncGenerator[Chunk, None] | None = None

    @property
    def was_alone(self) -> bool:
        """Whether no other request used the sandbox since it began."""
        return self.alone_at == self.owned.visits

    @property
    def recreated(self) -> bool:
        return self.loss is not None

    @property
    def kept_bytes(self) -> int:
        return len(self.command.stdout_bytes) + len(self.command.stderr_bytes)

    def output(self) -> AsyncIterator[Chunk]:
        """Iterate over its output: all if it was followed from its start, else what is kept."""
        return self.command.output() if self.chunks is None else self.chunks


def _follow(command: Command) -> AsyncGenerator[Chunk, None]:
    """Iterate over its output from the first byte. Call this as soon as it is started: output that
    comes before its consumer is not kept."""
    source = command.output()
    first = asyncio.ensure_future(anext(source, None))

    async def rest() -> AsyncGenerator[Chunk, None]:
        try:
            if (chunk := await first) is not None:
                yield chunk
            async for chunk in source:
                yield chunk
        finally:
            first.cancel()

    return rest()


class Runner:
    """Runs programs for users."""

    def __init__(
        self,
        sandboxes: UserSandboxes,
        executions: Executions,
        journal: Journal,
        metrics: Metrics,
        spools: Path,
        hide: PathHider,
    ) -> None:
        self._hide = hide
        self._spools = spools
        self._sandboxes = sandboxes
        self._executions = executions
        self._journal = journal
        self._metrics = metrics
        self._saves: set[asyncio.Task[Any]] = set()

    async def run(self, user_id: str, program: Program) -> dict[str, Any]:
        """Run it to its end. The answer of a program that was stopped has its error. A large output
        is a SpooledText in it."""
        started = time.monotonic()
        run: Run | None = None
        spool = Spool(self._spools, MAX_OUTPUT, self._sandboxes.sandbox_id(user_id))
        try:
            options: dict[str, Any] = {"max_output": 0, "on_output_bytes": spool.take}
            async with self.running(user_id, program, listed=True, **options) as run:
                result = await run.command.wait()
                answer = _answer(result["exit_code"], spool, run)
                # These two overlap: one waits for the spawner, the other has its listing by now.
                saving = self._begin_save(run.owned, Listed(run.command, run.saves))
                answer["stats"] = await _stats(run.owned.sandbox)
                run.files_kept = answer["files_kept"] = await asyncio.shield(saving)
        except StoppedError as error:
            answer = stopped_answer(
                error,
                hide=self._hide,
                recreated=run is not None and run.recreated,
                files_kept=run is None or bool(run.files_kept),
            )
            output = {"stdout": spool.text_of("stdout"), "stderr": spool.text_of("stderr")}
            answer["output"] = output["stdout"]
            answer["result"] = {**answer["result"], **output, "truncated": spool.truncated}
        except BaseException:
            spool.close()
            raise
        kept = run is None or run.files_kept
        trouble = None if run is None or kept else run.owned.workspace.trouble
        answer["files_error"] = self._hide(trouble) if trouble else trouble
        answer["execution_time"] = time.monotonic() - started
        return answer

    @asynccontextmanager
    async def following(self, user_id: str, program: Program) -> AsyncIterator[Run]:
        """Like running(), with all output read as it comes: none of it is kept."""
        async with self.running(user_id, program, follow=True, max_output=0) as run:
            yield run

    @asynccontextmanager
    async def running(
        self,
        user_id: str,
        program: Program,
        *,
        follow: bool = False,
        listed: bool = False,
        **more: Any,
    ) -> AsyncIterator[Run]:
        """A running program; leaving the block ends it, keeps the files and writes the log. With
        ``listed``, the guest lists what it changed as soon as it has ended."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._executions.one(user_id))
            owned = await stack.enter_async_context(self._sandboxes.using(user_id))
            owned.execution_count += 1
            loss = owned.loss if owned.recreated else None  # another answer may tell meanwhile
            begun = time.monotonic()
            run: Run | None = None
            failure: BaseException | None = None
            try:
                before, alone_at = owned.sandbox.last_usage, owned.alone_at
                saves = owned.workspace.saves
                if listed:
                    more["then_listed"] = owned.workspace.token
                command = await program.start(owned.sandbox, **more)
                run = Run(owned, command, saves, loss=loss, before=before, alone_at=alone_at)
                run.takes_input = program.options.get("stdin") is True
                if follow:
                    run.chunks = _follow(run.command)
                async with run.command:
                    yield run
            except BaseException as error:
                failure = error
                raise
            finally:
                self._log(owned, program, run, failure, time.monotonic() - begun)
                await (self._save(owned) if run is None else self.keep(run))

    async def keep(self, run: Run) -> bool:
        """Save what an ended program left, unless that was done. Returns whether all is kept."""
        if run.files_kept is None:
            run.files_kept = await self._save(run.owned)
        return run.files_kept

    async def _save(self, owned: UserSandbox) -> bool:
        """Save the files to the end, also when the caller is cancelled meanwhile."""
        return await asyncio.shield(self._begin_save(owned))

    def _begin_save(self, owned: UserSandbox, after: Listed | None = None) -> asyncio.Task[bool]:
        saving = asyncio.create_task(self._sandboxes.save(owned, after))
        self._saves.add(saving)
        saving.add_done_callback(self._saves.discard)
        return saving

    def _log(
        self,
        owned: UserSandbox,
        program: Program,
        run: Run | None,
        failure: BaseException | None,
        seconds: float,
    ) -> None:
        code = run.command.poll() if run is not None else None
        outcome = _outcome(failure, code)
        self._metrics.executions.labels(program.kind, outcome).inc()
        self._metrics.durations.labels(program.kind).observe(seconds)
        self._journal.record_execution(
            user=owned.user_id,
            ok=outcome == "ok",
            content=program.text,
            kind=program.kind,
            cause=outcome,
            sandbox_id=owned.sandbox.sandbox_id,
            exit_code=code,
            seconds=round(seconds, 6),
            resources=_resources(run),
        )
        if isinstance(failure, SandboxError) and outcome in ("limit", "sandbox_lost"):
            self._journal.security_event(outcome, owned.sandbox.id, {"error": failure.message})

    async def close(self) -> None:
        for saving in list(self._saves):
            saving.cancel()
        await asyncio.gather(*self._saves, return_exceptions=True)


def _answer(exit_code: int, spool: Spool, run: Run) -> dict[str, Any]:
    stdout, stderr = spool.text_of("stdout"), spool.text_of("stderr")
    failed = f"Execution failed with exit code {exit_code}"
    return {
        "success": exit_code == 0,
        "output": stdout,
        "error": None if exit_code == 0 else stderr or failed,
        "exit_code": exit_code,
        "result": {
            "exit_code": exit_code,
            "stdout": stdout,
            "stderr": stderr,
            "timed_out": False,
            "truncated": spool.truncated,
        },
        "sandbox_id": run.owned.sandbox.sandbox_id,
        "error_type": None,
        "kind": None,
        "state_lost": False,
        "recreated": run.recreated,
    }


def stopped_answer(
    error: StoppedError, *, hide: PathHider, recreated: bool, files_kept: bool
) -> dict[str, Any]:
    """Return the answer for a program that was stopped."""
    partial = error_result(error)["result"]
    failure = classify(error)
    return {
        "success": False,
        "output": partial["stdout"],
        "error": hide(error.message),
        "exit_code": partial["exit_code"],
        "result": partial,
        "sandbox_id": error.sandbox_id,
        "error_type": type(error).__name__,
        "kind": failure.kind,
        "state_lost": failure.state_lost,
        "stats": None,
        "files_kept": files_kept,
        "recreated": recreated,
    }


async def _stats(sandbox: Sandbox) -> dict[str, Any] | None:
    try:
        return dict(await sandbox.get_stats())
    except SandboxError:
        return None


def _resources(run: Run | None) -> dict[str, Any] | None:
    """Return figures for the log, if they were read since it began. The kernel counts for the whole
    sandbox, so a program has its own figures only if it was alone in it."""
    after = run.owned.sandbox.last_usage if run is not None else None
    if run is None or after is None or after is run.before:
        return None
    figures = {
        "sandbox_cpu_seconds": after.cpu_seconds,
        "sandbox_memory_peak_mb": after.memory_peak_bytes / MIB,
        "sandbox_disk_mb": after.disk_bytes / MIB,
        "sandbox_processes": after.processes,
    }
    if run.before is not None and run.was_alone:
        figures["cpu_seconds"] = max(0.0, after.cpu_seconds - run.before.cpu_seconds)
    return {name: round(figure, 3) for name, figure in figures.items()}


def _outcome(failure: BaseException | None, exit_code: int | None) -> str:
    if isinstance(failure, SandboxError):
        return classify(failure).kind
    if isinstance(failure, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if failure is not None:
        return "internal"
    return "ok" if exit_code == 0 else "failed"
