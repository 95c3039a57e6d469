"""Checks of manager, executor and monitor on a real backend."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import (
    ResourceLimitError,
    SandboxConflictError,
    SandboxError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)
from ...executor import SandboxExecutor
from ...sandbox.monitor import SandboxMonitor
from .case import Case
from .expect import contains, equal, eventually, expect, raises
from .registry import check


@check()
async def a_manager_has_a_limit(case: Case) -> None:
    """A sandbox above the limit is refused at once; after a removal there is room again."""
    manager = case.manager(2)
    first = await manager.create(case.config)
    await manager.create(case.config)
    error = await raises(SandboxError, manager.create(case.config))
    equal(str(error), "Maximum number of sandboxes (2) reached")
    await manager.destroy(first.sandbox_id)
    await manager.create(case.config)
    equal(len(manager.active_sandboxes), 2)


@check()
async def a_manager_knows_its_sandboxes(case: Case) -> None:
    """They are found by id until they are destroyed; unknown ids are a KeyError."""
    manager = case.manager()
    sandbox_id = await manager.create_sandbox(case.config)
    sandbox = await manager.get_sandbox(sandbox_id)
    equal(await sandbox.run_command("echo found"), "found\n")
    await raises(SandboxConflictError, manager.create(case.config, sandbox_id))
    await manager.delete_sandbox(sandbox_id)
    equal(await manager.get(sandbox_id), None)
    error = await raises(SandboxNotFoundError, manager.get_sandbox(sandbox_id))
    equal(str(error), f"Sandbox {sandbox_id} not found")
    expect(isinstance(error, KeyError), "it is no KeyError")


@check()
async def a_managed_sandbox_goes(case: Case) -> None:
    """It is gone after the block, also when the block raises, and has an id of its own."""
    manager = case.manager()
    seen: set[str] = set()

    async def use(fail: bool) -> None:
        async with manager.managed_sandbox(case.config) as sandbox:
            seen.add(sandbox.sandbox_id)
            equal(await sandbox.run_command("echo in"), "in\n")
            if fail:
                raise LookupError

    await use(False)
    await raises(LookupError, use(True))
    equal(len(seen), 2)
    equal(manager.active_sandboxes, {})
    listed = {info.sandbox_id for info in await case.backend.list_sandboxes()}
    equal(listed & seen, set())


@check()
async def idle_sandboxes_go(case: Case) -> None:
    """An idle sandbox is removed, and one that runs a program is not."""
    manager = case.manager(idle_timeout=0.3, cleanup_interval=0.05)
    idle, busy = await manager.create(case.config), await manager.create(case.config)
    command = await busy.start_command("cat", stdin=True)

    async def removed() -> bool:
        return idle.sandbox_id not in manager.active_sandboxes

    await eventually(removed, "the idle one is still there")
    equal(busy.sandbox_id in manager.active_sandboxes, True, "the busy one is there")
    equal(command.poll(), None)
    await manager.cleanup()
    equal(manager.active_sandboxes, {})
    await manager.close()
    await manager.close()


@check(quick=True)
async def executor_success(case: Case) -> None:
    """execute_agent() returns success, result, stats and id; inputs are in inputs.json."""
    executor = SandboxExecutor(case.manager())
    code = "import json; print(sum(json.load(open('inputs.json'))['numbers']))"
    answer = await executor.execute_agent(code, case.config, {"numbers": [1, 2, 39]})
    expect(answer["success"], f"it failed: {answer.get('error')}")
    equal(answer["result"]["stdout"], "42\n")
    equal(answer["result"]["exit_code"], 0)
    expect(answer["sandbox_id"], "it has no sandbox_id")
    expect("error" not in answer, "a success has no error")
    expect(answer["stats"]["duration_seconds"] > 0, "it took no time")
    expect(answer["stats"]["monitoring"]["history_samples"] >= 1, "it was not monitored")
    equal(executor.manager.active_sandboxes, {})


@check()
async def executor_failure(case: Case) -> None:
    """A program that fails is a result with its stderr as the error."""
    executor = SandboxExecutor(case.manager())
    answer = await executor.execute_agent("print('out'); 1 / 0", case.config, monitor=False)
    equal(answer["success"], False)
    equal((answer["result"]["exit_code"], answer["result"]["stdout"]), (1, "out\n"))
    contains(answer["error"], "ZeroDivisionError")
    contains(answer["error"], "agent_code.py")
    equal(executor.manager.active_sandboxes, {})


@check()
async def executor_timeout(case: Case) -> None:
    """A program that was stopped is an exception, and its sandbox is gone."""
    executor = SandboxExecutor(case.manager())
    work = executor.execute_agent("while True: pass", case.config, timeout=1)
    await raises(SandboxTimeoutError, work)
    equal(executor.manager.active_sandboxes, {})


@check()
async def a_failed_sandbox_can_be_kept(case: Case) -> None:
    """rollback_on_error=False keeps it for inspection until the executor is closed."""
    executor = SandboxExecutor(case.manager())
    code = "open('trace', 'w').write('here'); raise SystemExit(2)"
    answer = await executor.execute_agent(code, case.config, rollback_on_error=False)
    sandbox = await executor.manager.get_sandbox(str(answer["sandbox_id"]))
    equal(await sandbox.read_file("trace"), "here")
    await executor.close()
    equal(executor.manager.active_sandboxes, {})


@check()
async def a_batch_keeps_its_order(case: Case) -> None:
    """Results are in the order of the jobs; a failed or stopped one loses no other."""
    executor = SandboxExecutor(case.manager(2))
    jobs: list[dict[str, Any]] = [
        {"agent_code": "import time; time.sleep(0.3); print('first')"},
        {"agent_code": "raise SystemExit(3)"},
        {"agent_code": "while True: pass", "timeout": 1},
        {"agent_code": "import json; print(json.load(open('inputs.json')))", "inputs": {"a": 1}},
    ]
    answers = await executor.execute_batch(jobs, case.config)
    equal([answer["success"] for answer in answers], [True, False, False, True])
    equal(answers[0]["result"]["stdout"], "first\n")
    equal(answers[1]["result"]["exit_code"], 3)
    equal((answers[2]["error_type"], answers[2]["job_index"]), ("SandboxTimeoutError", 2))
    equal(answers[2]["result"]["timed_out"], True)
    equal(answers[3]["result"]["stdout"], "{'a': 1}\n")


@check()
async def a_batch_runs_side_by_side(case: Case) -> None:
    """Three jobs on a manager of two: two are alive together, never three."""
    manager = case.manager(2)
    executor = SandboxExecutor(manager)
    together = asyncio.Event()
    printed = most = 0

    async def hear(text: str) -> None:
        # The first two jobs end only when both have printed, so that they have to run together.
        nonlocal printed, most
        printed += text.count("up")
        listed = await case.backend.list_sandboxes()
        most = max(most, len({i.sandbox_id for i in listed} & set(manager.active_sandboxes)))
        if printed >= 2:
            together.set()
        await asyncio.wait_for(together.wait(), 100)

    jobs = [{"agent_code": "print('up')", "on_stdout": hear, "monitor": False}] * 3
    answers = await executor.execute_batch(jobs, case.config)
    equal([answer["success"] for answer in answers], [True] * 3)
    equal(most, 2, "sandboxes alive at once")


@check()
async def a_monitor_takes_samples(case: Case) -> None:
    """While code runs, samples are taken; averages and peaks have their three keys."""
    sandbox = await case.sandbox()
    warned: list[object] = []

    def warn(sample: object) -> None:
        warned.append(sample)
        raise LookupError("a callback that fails does not end the monitoring")

    async with SandboxMonitor(sandbox, 0.05, on_warning=warn) as monitor:
        await sandbox.run_code("import time; time.sleep(0.5)")
        expect(len(monitor.get_history()) >= 2, "no samples were taken meanwhile")
    for figures in (monitor.get_averages(), monitor.get_peaks()):
        equal(set(figures), {"cpu_percent", "memory_percent", "memory_mb"})
        lowest = min(figures["cpu_percent"], figures["memory_percent"], figures["memory_mb"])
        expect(lowest >= 0, f"negative: {figures}")
    equal(len(monitor.get_history(2)), 2)
    equal(monitor.get_history()[-2:], monitor.get_history(2))


@check(needs=("usage", "memory"))
async def a_monitor_sees_the_load(case: Case) -> None:
    """A program that fills memory and burns CPU shows, and the warning is given."""
    sandbox = await case.sandbox(memory_mb=128, cpu_cores=0.5)
    warned = asyncio.Event()
    hog = "x = bytearray(b'1') * (110 << 20)\nprint(flush=True)\nwhile True: pass"
    monitor = SandboxMonitor(sandbox, 0.1, on_warning=lambda _: warned.set())
    async with monitor, await sandbox.start_code(hog) as command:
        await anext(command.output())
        warned.clear()
        await asyncio.wait_for(warned.wait(), 100)
    expect(monitor.get_peaks()["memory_mb"] > 100, f"peaks are {monitor.get_peaks()}")


@check(needs=("memory",))
async def a_batch_names_the_limit(case: Case) -> None:
    """In a batch, a job over its memory limit becomes a result with its error type."""
    executor = SandboxExecutor(case.manager())
    config = case.config.model_copy(update={"memory_mb": 128})
    jobs = [{"agent_code": "x = bytearray(b'1') * (1 << 30)"}, {"agent_code": "print('fine')"}]
    answers = await executor.execute_batch(jobs, config)
    equal(answers[0].get("error_type"), ResourceLimitError.__name__)
    contains(answers[0]["error"], "Memory limit")
    equal(answers[1]["success"], True)
