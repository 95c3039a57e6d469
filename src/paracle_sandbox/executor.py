"""Run a piece of Python in a sandbox of its own, and tell how it went: SandboxExecutor, run().

A program that failed is a result with ``success: False``; a program that was stopped (deadline,
limit, broken sandbox) is an exception. Either way its sandbox is gone afterwards, unless
``rollback_on_error=False`` asked to keep a failed one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, cast

from .backends.base import Backend, Health
from .background import Call, worker
from .compat.sandbox_settings import ConfigLike, full_config
from .config import SandboxConfig
from .errors import (
    SandboxCleanupError,
    SandboxError,
)
from .manager import SandboxManager, at_least_one
from .results import ExecutionResult, JobResult
from .sandbox.command_options import Stdin, check_stdin, checked_timeout
from .sandbox.execution import error_result, execute_source
from .sandbox.output import TextCallback
from .sandbox.sandbox import Sandbox

logger = logging.getLogger(__name__)

Inputs = Mapping[str, Any]


_KEYS = frozenset(
    ["config", "inputs", "monitor", "rollback_on_error", "args", "stdin", "env", "timeout",
     "on_stdout", "on_stderr"]
)  # fmt: skip


class HealthReport(TypedDict):
    """The answer of health_check(); ``error`` is None when all is well."""

    available: bool
    docker_available: bool
    test_passed: bool
    error: str | None
    backend: str | None


@dataclass(frozen=True)
class Job:
    """Says what to run, with what, and what to do with the sandbox of a failure."""

    source: bytes
    inputs: bytes | None = None
    monitor: bool = True
    rollback_on_error: bool = True
    args: tuple[str, ...] = ()
    stdin: Stdin = None
    env: Mapping[str, str] | None = None
    timeout: float | None = None
    on_stdout: TextCallback | None = None
    on_stderr: TextCallback | None = None

    @classmethod
    def prepare(
        cls,
        agent_code: str | Path,
        inputs: Inputs | None = None,
        *,
        args: Sequence[str] = (),
        stdin: Stdin = None,
        timeout: float | None = None,
        **rest: Any,
    ) -> Job:
        """Read and check the parts. Raises SandboxError that says which one is wrong, TypeError
        for what could not be meant."""
        check_stdin(stdin)
        if timeout is not None:
            timeout = _seconds(timeout)
        if isinstance(args, str):
            raise SandboxError("args must be a list of strings, not one string")
        source = read_source(agent_code)
        return cls(
            source, dump_inputs(inputs), args=tuple(args), stdin=stdin, timeout=timeout, **rest
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> tuple[Job, SandboxConfig | None]:
        """Read a job of a batch, and its own configuration if it has one."""
        if not isinstance(fields, Mapping) or "agent_code" not in fields:
            raise SandboxError("A job must be a dict with the key 'agent_code'")
        rest = {key: value for key, value in fields.items() if key != "agent_code"}
        unknown = sorted(map(str, set(rest) - _KEYS))
        if unknown:
            known = ", ".join(sorted(_KEYS))
            raise SandboxError(f"A job has no key {unknown[0]!r}; known are agent_code, {known}")
        config = rest.pop("config", None)
        own = None if config is None else full_config(config)
        return cls.prepare(fields["agent_code"], **rest), own


class SandboxExecutor:
    """Runs agents' code. Without a manager it makes one, and closes it with itself."""

    def __init__(
        self, manager: SandboxManager | None = None, *, backend: Backend | str | None = None
    ) -> None:
        if manager is not None and backend is not None:
            raise ValueError("give a manager or a backend; a manager has its own backend")
        self.manager = manager or SandboxManager(backend=backend)
        self._owns_manager = manager is None
        self._kept: list[str] = []

    async def execute_agent(
        self,
        agent_code: str | Path,
        config: ConfigLike | None = None,
        inputs: Inputs | None = None,
        monitor: bool = True,
        rollback_on_error: bool = True,
        *,
        args: Sequence[str] = (),
        stdin: Stdin = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> ExecutionResult:
        """Run ``agent_code`` in a fresh sandbox and wait for it.

        A Path is a file of the host, a str is always code. ``config`` may be a dict of its
        fields. ``inputs`` becomes ``inputs.json`` in the working directory.

        Raises SandboxTimeoutError, ResourceLimitError or SandboxExecutionError when the program
        was stopped, each with its partial output; SandboxCreationError or SandboxLimitError when
        there is no sandbox to run it in; SandboxError when the code or the inputs cannot be read.
        With ``rollback_on_error=False`` a failed sandbox stays until close(), and ``sandbox_id``
        of the result or the exception names it.
        """
        job = Job.prepare(
            agent_code, inputs, monitor=monitor, rollback_on_error=rollback_on_error,
            args=args, stdin=stdin, env=env, timeout=timeout,
            on_stdout=on_stdout, on_stderr=on_stderr,
        )  # fmt: skip
        return await self._run_in(await self.manager.create(config), job)

    async def execute_batch(
        self,
        jobs: Iterable[Mapping[str, Any]],
        config: ConfigLike | None = None,
        max_concurrent: int | None = None,
    ) -> list[JobResult]:
        """Run every job in its own sandbox, side by side; results in the order of the jobs.

        A job is the keywords of execute_agent() as a dict; its own ``config`` wins over the
        batch's. A job waits for room instead of failing. What execute_agent() would raise
        becomes a result with ``error``, ``error_type`` and ``job_index``.
        """
        width = self.manager.max_concurrent
        if max_concurrent is not None:
            width = min(at_least_one("max_concurrent", max_concurrent), width)
        jobs = list(jobs)
        results: list[JobResult | None] = [None] * len(jobs)
        queue = iter(enumerate(jobs))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(width, len(jobs))):
                group.create_task(self._work_off(queue, results, config))
        return [result for result in results if result is not None]

    async def health_check(self) -> HealthReport:
        """Say whether code can be run here, proved by running some. Never raises SandboxError."""
        report: HealthReport = {
            "available": False, "docker_available": False, "test_passed": False,
            "error": None, "backend": None,
        }  # fmt: skip
        try:
            backend = self.manager.backend
            report["backend"] = backend.name
            health = await backend.health()
            report["docker_available"] = backend.name in ("docker", "gvisor") and health.available
            if not health.available:
                report["error"] = _unavailable(health)
                return report
            config = self.manager.settings.default_config(backend.name)
            small = {"cpu_cores": 0.5, "memory_mb": 256, "timeout_seconds": 30}
            result = await self.execute_agent(
                "print('Sandbox test OK')", config.model_copy(update=small), monitor=False
            )
        except SandboxError as error:
            report["error"] = f"Health check failed: {error}"
            return report
        passed = result["success"] and "Sandbox test OK" in result["result"]["stdout"]
        report["available"] = report["test_passed"] = passed
        if not passed:
            report["error"] = f"Health check failed: {result.get('error', 'no output')}"
        return report

    async def close(self) -> None:
        """Remove what was kept for inspection, and an own manager. Idempotent."""
        if self._owns_manager:
            await self.manager.close()
            return
        kept, self._kept = self._kept, []
        for sandbox_id in kept:
            await self.manager.destroy(sandbox_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _work_off(
        self,
        queue: Iterator[tuple[int, Mapping[str, Any]]],
        results: list[JobResult | None],
        config: ConfigLike | None,
    ) -> None:
        for index, fields in queue:
            try:
                job, own_config = Job.from_fields(fields)
                sandbox = await self.manager.create_when_free(own_config or config)
                results[index] = cast("JobResult", await self._run_in(sandbox, job))
            except Exception as error:  # one job must never lose another, whatever went wrong
                if not isinstance(error, SandboxError | ValueError):
                    logger.exception("Job %d of a batch failed", index)
                results[index] = error_result(error, job_index=index)

    async def _run_in(self, sandbox: Sandbox, job: Job) -> ExecutionResult:
        keep = False
        try:
            result = await self._execute(sandbox, job)
            keep = not result["success"] and not job.rollback_on_error
            return result
        except SandboxError as error:
            error.sandbox_id = error.sandbox_id or sandbox.sandbox_id
            keep = not job.rollback_on_error
            raise
        finally:
            if keep:
                self._kept.append(sandbox.sandbox_id)
                self.manager.keep(sandbox.sandbox_id)
            else:
                await self._discard(sandbox)

    async def _execute(self, sandbox: Sandbox, job: Job) -> ExecutionResult:
        return await execute_source(
            sandbox, job.source, job.args, inputs=job.inputs, monitor=job.monitor,
            timeout=job.timeout, stdin=job.stdin, env=job.env,
            on_stdout=job.on_stdout, on_stderr=job.on_stderr,
        )  # fmt: skip

    async def _discard(self, sandbox: Sandbox) -> None:
        try:
            await self.manager.destroy(sandbox.sandbox_id)
        except SandboxCleanupError as error:
            # The program's own outcome matters more; the manager still lists the sandbox, and
            # its close() tries again and raises.
            logger.error("Sandbox %s stays behind: %s", sandbox.sandbox_id, error)


async def run_async(
    code: str | Path,
    *,
    config: ConfigLike | None = None,
    inputs: Inputs | None = None,
    timeout: float | None = None,
    args: Sequence[str] = (),
    stdin: Stdin = None,
    env: Mapping[str, str] | None = None,
    monitor: bool = False,
    on_stdout: TextCallback | None = None,
    on_stderr: TextCallback | None = None,
    backend: Backend | str | None = None,
) -> ExecutionResult:
    """Run code in a fresh sandbox, with an executor that lives for this one call. For many calls,
    keep a SandboxExecutor."""
    async with SandboxExecutor(backend=backend) as executor:
        return await executor.execute_agent(
            code, config, inputs, monitor, args=args, stdin=stdin, env=env, timeout=timeout,
            on_stdout=on_stdout, on_stderr=on_stderr,
        )  # fmt: skip


def run(
    code: str | Path,
    *,
    config: ConfigLike | None = None,
    inputs: Inputs | None = None,
    timeout: float | None = None,
    args: Sequence[str] = (),
    stdin: Stdin = None,
    env: Mapping[str, str] | None = None,
    monitor: bool = False,
    on_stdout: TextCallback | None = None,
    on_stderr: TextCallback | None = None,
    backend: Backend | str | None = None,
) -> ExecutionResult:
    """Run code in a fresh sandbox and wait for it, with or without an event loop around.

    Inside a running loop (a notebook) it blocks that loop; use run_async() there if you can.
    The callbacks are called in the thread of the caller. An interrupt ends the program. The backend
    is kept for later calls, and closed when this process ends, unless it was given as an object.
    """
    call = Call()

    async def work() -> ExecutionResult:
        async with worker().manager(backend) as manager, SandboxExecutor(manager) as executor:
            return await executor.execute_agent(
                code, config, inputs, monitor, args=args, stdin=stdin, env=env, timeout=timeout,
                on_stdout=call.in_caller(on_stdout), on_stderr=call.in_caller(on_stderr),
            )  # fmt: skip

    return call.wait_for(worker().submit(work))


def _unavailable(health: Health) -> str:
    if "not available" in health.detail:
        return health.detail
    name = "Docker" if health.backend == "docker" else f"The {health.backend} backend"
    remedy = f" {health.remedy}" if health.remedy else ""
    return f"{name} not available: {health.detail}{remedy}"


def _seconds(timeout: float) -> float:
    try:
        return checked_timeout(timeout)
    except ValueError as error:
        raise SandboxError(f"timeout must be positive, not {timeout}") from error


def read_source(agent_code: str | Path) -> bytes:
    """Return the source. A Path is a file of the host, a str is always the code itself: code is
    often written by a model, and a line of it must never choose a file of the host."""
    if isinstance(agent_code, str):
        try:
            return agent_code.encode()
        except UnicodeEncodeError as error:
            raise SandboxError(f"agent_code is not valid text: {error}") from error
    if not isinstance(agent_code, Path):
        raise SandboxError(f"agent_code must be a str or a Path, not {type(agent_code).__name__}")
    if not agent_code.is_file():
        raise SandboxError(f"Agent code file not found: {agent_code}")
    try:
        return agent_code.read_bytes()
    except OSError as error:
        raise SandboxError(f"Agent code file cannot be read: {error}") from error


def dump_inputs(inputs: Inputs | None) -> bytes | None:
    """Return the content of inputs.json; None when there is nothing to write."""
    if inputs is None:
        return None
    try:
        # NaN and the infinities are no JSON, although Python would write them.
        return json.dumps(inputs, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SandboxError(f"inputs cannot be written as JSON: {error}") from error
