"""run(): one piece of code, one call, nothing left behind.

The module is not called ``run``, because importing a module of that name would replace the
function of that name on the package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .backends.base import Backend
from .consumers import TextCallback
from .executor import SandboxExecutor
from .job import Inputs
from .launch import Stdin
from .results import ExecutionResult
from .sandbox_settings import ConfigLike

_LOOK_SECONDS = 0.1


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
    """SandboxExecutor.execute_agent() with an executor that lives for this one call."""
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
    The callbacks are then called in another thread. An interrupt ends the program either way.
    """
    work = run_async(
        code, config=config, inputs=inputs, timeout=timeout, args=args, stdin=stdin, env=env,
        monitor=monitor, on_stdout=on_stdout, on_stderr=on_stderr, backend=backend,
    )  # fmt: skip
    if not _inside_a_loop():
        return asyncio.run(work)
    return _run_in_thread(work)


def _run_in_thread(work: Coroutine[Any, Any, ExecutionResult]) -> ExecutionResult:
    """In a loop of another thread. An interrupt reaches only this one, which has to pass it on:
    else it would wait for a program that may run for minutes."""
    begun: Future[Callable[[], object]] = Future()
    with ThreadPoolExecutor(1, thread_name_prefix="paracle-run") as helper:
        outcome = helper.submit(asyncio.run, _cancellable(work, begun))
        try:
            _wait_for(outcome)
        finally:
            if not outcome.done():
                with suppress(RuntimeError):  # its loop has just ended by itself
                    begun.result()()
        return outcome.result()


def _wait_for(outcome: Future[ExecutionResult]) -> None:
    """Until it is there, or nobody wants it any more: in a notebook an interrupt is raised here,
    under asyncio.run() it cancels the task that called us."""
    caller = asyncio.current_task()
    before = caller.cancelling() if caller else 0
    while not wait([outcome], _LOOK_SECONDS).done:
        if caller and caller.cancelling() > before:
            return


async def _cancellable(
    work: Coroutine[Any, Any, ExecutionResult], begun: Future[Callable[[], object]]
) -> ExecutionResult:
    """The work; ``begun`` is given what cancels it, from any thread."""
    task = asyncio.current_task()
    assert task is not None
    begun.set_result(partial(task.get_loop().call_soon_threadsafe, task.cancel))
    return await work


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
