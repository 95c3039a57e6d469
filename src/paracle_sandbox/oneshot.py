"""run(): one piece of code, one call, nothing left behind.

The module is not called ``run``, because importing a module of that name would replace the
function of that name on the package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .backends.base import Backend
from .consumers import TextCallback
from .executor import SandboxExecutor
from .job import Inputs
from .launch import Stdin
from .results import ExecutionResult
from .sandbox_settings import ConfigLike


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
    The callbacks are then called in another thread.
    """
    work = run_async(
        code, config=config, inputs=inputs, timeout=timeout, args=args, stdin=stdin, env=env,
        monitor=monitor, on_stdout=on_stdout, on_stderr=on_stderr, backend=backend,
    )  # fmt: skip
    if not _inside_a_loop():
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="paracle-run") as helper:
        return helper.submit(asyncio.run, work).result()


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
