"""Tests of SandboxExecutor: what it returns, what it raises, and that it leaves nothing behind."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paracle_sandbox import (
    ResourceLimitError,
    SandboxCleanupError,
    SandboxConfig,
    SandboxCreationError,
    SandboxError,
    SandboxExecutor,
    SandboxLimitError,
    SandboxManager,
    SandboxSettings,
    SandboxTimeoutError,
    Settings,
)
from paracle_sandbox.backends.base import Health, Usage
from paracle_sandbox.sandbox.execution import error_result
from paracle_sandbox.settings import load_settings
from paracle_sandbox.testing.fake import FakeBackend


class WatchedBackend(FakeBackend):
    """A backend that knows what is alive and can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[str] = set()
        self.configs: list[SandboxConfig] = []
        self.peak = 0
        self.refuse_destroy = False
        self.refuse_usage = False
        self.sick = False

    async def create(self, sandbox_id: str, config: SandboxConfig, labels: Any) -> None:
        await super().create(sandbox_id, config, labels)
        self.alive.add(sandbox_id)
        self.configs.append(config)
        self.peak = max(self.peak, len(self.alive))

    async def destroy(self, sandbox_id: str) -> None:
        if self.refuse_destroy:
            raise SandboxCleanupError("refused", sandbox_id)
        await super().destroy(sandbox_id)
        self.alive.discard(sandbox_id)

    async def usage(self, sandbox_id: str) -> Usage:
        if self.refuse_usage:
            raise SandboxError("no usage today", sandbox_id)
        return await super().usage(sandbox_id)

    async def health(self) -> Health:
        if self.sick:
            return Health("fake", False, "it is sick.", "Cure it.")
        return await super().health()


@pytest.fixture
async def backend() -> AsyncIterator[WatchedBackend]:
    backend = WatchedBackend()
    yield backend
    await backend.close()


@pytest.fixture
async def executor(backend: WatchedBackend) -> AsyncIterator[SandboxExecutor]:
    manager = SandboxManager(3, backend=backend, settings=Settings())
    async with manager, SandboxExecutor(manager) as executor:
        yield executor


async def test_success(executor: SandboxExecutor, backend: WatchedBackend) -> None:
    result = await executor.execute_agent(
        agent_code="print('Hello')",
        config=SandboxConfig(cpu_cores=0.5, memory_mb=256),
        monitor=False,
    )
    assert result["success"] is True
    assert result["result"] == {
        "exit_code": 0, "stdout": "Hello\n", "stderr": "", "timed_out": False, "truncated": False,
    }  # fmt: skip
    assert "error" not in result
    assert "monitoring" not in result["stats"]
    assert len(str(result["sandbox_id"])) == 26
    for key in ("cpu_percent", "memory_mb", "memory_percent", "network_rx_bytes"):
        assert key in result["stats"]
    assert 0 < result["stats"]["duration_seconds"] < 5
    assert json.loads(json.dumps(result)) == result
    assert not backend.alive


async def test_failure_is_a_result(executor: SandboxExecutor, backend: WatchedBackend) -> None:
    result = await executor.execute_agent("1/0")
    assert result["success"] is False
    assert result["result"]["exit_code"] == 1
    assert "ZeroDivisionError" in result["error"]
    assert result["error"] == result["result"]["stderr"]
    silent = await executor.execute_agent("import sys; sys.exit(7)", monitor=False)
    assert silent["error"] == "Execution failed with exit code 7"
    assert not backend.alive


async def test_inputs_arguments_stdin_and_environment(executor: SandboxExecutor) -> None:
    code = """
import json, os, sys
print(json.load(open("inputs.json"))["name"], sys.argv[1:], sys.stdin.read(), os.environ["COLOUR"])
print(os.path.basename(sys.argv[0]))
"""
    result = await executor.execute_agent(
        code, inputs={"name": "Päracle"}, args=["a", "b c"], stdin="typed", env={"COLOUR": "red"}
    )
    assert result["result"]["stdout"] == "Päracle ['a', 'b c'] typed red\nagent_code.py\n"
    looks = "import os; print(os.path.exists('inputs.json'))"
    result = await executor.execute_agent(looks, monitor=False)
    assert result["result"]["stdout"] == "False\n"


async def test_stdin_of_other_bytes_and_of_none(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    result = await executor.execute_agent("print(input())", stdin=bytearray(b"typed"), timeout=10)
    assert result["result"]["stdout"] == "typed\n"
    made = len(backend.created)
    with pytest.raises(TypeError, match="stdin must be"):
        await executor.execute_agent("print(input())", stdin=5, timeout=10)  # type: ignore[arg-type]
    assert len(backend.created) == made


async def test_code_arrives_byte_by_byte(executor: SandboxExecutor, tmp_path: Path) -> None:
    """No content of the code can end it early, and its size does not matter."""
    code = "x = '''\nEOF\n'$(id)'\\\\ \"'''\nprint(x)\n# " + "é" * 200_000
    result = await executor.execute_agent(code, monitor=False)
    assert result["result"]["stdout"] == "\nEOF\n'$(id)'\\ \"\n"
    latin = tmp_path / "latin.py"
    latin.write_bytes(b"# coding: latin-1\nprint(len('\xe9'))\n")
    assert (await executor.execute_agent(latin, monitor=False))["result"]["stdout"] == "1\n"


async def test_a_path_is_a_file_and_a_string_never(
    executor: SandboxExecutor, backend: WatchedBackend, tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text("print('from a file')", encoding="utf-8")
    result = await executor.execute_agent(file, monitor=False)
    assert result["result"]["stdout"] == "from a file\n"
    assert not (await executor.execute_agent(str(file), monitor=False))["success"]
    backend.configs.clear()
    with pytest.raises(SandboxError, match=r"Agent code file not found: .*none\.py"):
        await executor.execute_agent(tmp_path / "none.py")
    with pytest.raises(SandboxError, match="inputs cannot be written as JSON"):
        await executor.execute_agent("", inputs={"x": object()})
    with pytest.raises(SandboxError, match="not valid text"):
        await executor.execute_agent("\udcff")
    with pytest.raises(SandboxError, match="timeout must be positive"):
        await executor.execute_agent("", timeout=0)
    assert not backend.configs  # this was found before a sandbox was created


async def test_monitoring(executor: SandboxExecutor) -> None:
    result = await executor.execute_agent("import time; time.sleep(0.7)", monitor=True)
    monitoring = result["stats"]["monitoring"]
    assert set(monitoring["averages"]) == {"cpu_percent", "memory_percent", "memory_mb"}
    assert set(monitoring["peaks"]) == set(monitoring["averages"])
    assert monitoring["history_samples"] >= 3
    assert "timestamp" not in result["stats"]


async def test_output_is_streamed(executor: SandboxExecutor) -> None:
    out: list[str] = []
    err: list[str] = []
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr)"
    await executor.execute_agent(code, on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("one\n", "two\n")


@pytest.mark.clock
async def test_a_deadline_is_raised_and_leaves_nothing(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    code = "print('begun', flush=True)\nwhile True: pass"
    started = time.monotonic()
    with pytest.raises(SandboxTimeoutError, match="timed out") as caught:
        await executor.execute_agent(code, timeout=0.5)
    assert time.monotonic() - started < 4
    assert caught.value.timeout_seconds == 0.5
    assert caught.value.stdout == "begun\n"
    assert caught.value.sandbox_id
    assert isinstance(caught.value, TimeoutError)
    assert not backend.alive


async def test_too_much_output_is_raised(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    with pytest.raises(ResourceLimitError) as caught:
        await executor.execute_agent(
            "while True: print('x' * 1000)", SandboxConfig(max_output_mb=1), monitor=False
        )
    assert caught.value.resource_type == "output"
    assert not backend.alive


async def test_cancellation_leaves_nothing(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    for keeps in (True, False):
        running = asyncio.create_task(
            executor.execute_agent("import time; time.sleep(60)", rollback_on_error=keeps)
        )
        async with asyncio.timeout(5):
            while not backend.alive:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not backend.alive


async def test_without_rollback_a_failure_stays_for_inspection(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    code = "open('trace.txt', 'w').write('here'); raise SystemExit(3)"
    result = await executor.execute_agent(code, rollback_on_error=False, monitor=False)
    assert backend.alive == {result["sandbox_id"]}
    kept = await executor.manager.get_sandbox(str(result["sandbox_id"]))
    assert await kept.read_file("trace.txt") == "here"
    with pytest.raises(SandboxTimeoutError) as caught:
        await executor.execute_agent("while True: pass", rollback_on_error=False, timeout=0.2)
    assert backend.alive == {result["sandbox_id"], caught.value.sandbox_id}
    await executor.execute_agent("print('fine')", rollback_on_error=False)
    assert len(backend.alive) == 2  # a success is not kept
    await executor.close()
    assert not backend.alive


async def test_a_good_run_stays_good_when_figures_or_removal_fail(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    backend.refuse_usage = True
    for monitor in (True, False):
        result = await executor.execute_agent("print(1)", monitor=monitor)
        assert result["success"]
        assert result["stats"]["memory_limit_mb"] == 512
    backend.refuse_usage = False
    backend.refuse_destroy = True
    result = await executor.execute_agent("print(1)")
    assert result["success"]
    with pytest.raises(SandboxCleanupError):  # not forgotten
        await executor.manager.close()
    backend.refuse_destroy = False
    await executor.manager.close()
    assert not backend.alive


async def test_batch_is_parallel_bounded_and_ordered(
    executor: SandboxExecutor, backend: WatchedBackend, tmp_path: Path
) -> None:
    """Each program waits for its neighbour, which would hang if they ran one after the other."""
    code = """
import json, os, time
inputs = json.load(open("inputs.json"))
open(inputs["mine"], "w").close()
while not os.path.exists(inputs["theirs"]):
    time.sleep(0.01)
print(inputs["mine"][-1])
"""
    jobs = [
        {
            "agent_code": code,
            "inputs": {"mine": f"{tmp_path}/{i}", "theirs": f"{tmp_path}/{i ^ 1}"},
            "monitor": False,
            "timeout": 20,
        }
        for i in range(4)
    ]
    results = await executor.execute_batch(jobs, max_concurrent=2)
    assert [result["result"]["stdout"] for result in results] == ["0\n", "1\n", "2\n", "3\n"]
    assert backend.peak == 2
    assert not backend.alive
    assert await executor.execute_batch([]) == []


async def test_batch_never_loses_a_job(executor: SandboxExecutor, backend: WatchedBackend) -> None:
    jobs: list[Any] = [
        {"agent_code": "print('ok')"},
        {"agent_code": "1/0"},
        {"agent_code": "print('said', flush=True)\nwhile True: pass", "timeout": 0.4},
        {"code": "print()"},
        {"agent_code": "print()", "nonsense": 1},
        {"agent_code": "print()", "config": 256},
        "print()",
        {"agent_code": Path("/nowhere/at/all.py")},
        {"agent_code": 3},
        {"agent_code": "print('ok')", "config": SandboxSettings(memory_limit="1m")},
        {"agent_code": "print('ok')", "args": "abc"},
        {"agent_code": "print()", "config": {"memory_mb": 1}},
        {"agent_code": "print('ok')", "config": {"memory_mb": 444}},
        {"agent_code": "print('last')", "config": SandboxConfig(memory_mb=333)},
    ]
    results = await executor.execute_batch(jobs, SandboxConfig(memory_mb=222))
    assert [result["success"] for result in results] == [True] + [False] * 11 + [True] * 2
    assert "ZeroDivisionError" in results[1]["error"]
    assert "error_type" not in results[1]
    timed_out = results[2]
    assert (timed_out["error_type"], timed_out["job_index"]) == ("SandboxTimeoutError", 2)
    assert timed_out["sandbox_id"]
    assert timed_out["result"]["stdout"] == "said\n"
    assert timed_out["result"]["timed_out"] is True
    for index, complaint in [
        (3, "'agent_code'"), (4, "no key 'nonsense'"), (5, "must be a SandboxConfig"),
        (6, "must be a dict"), (7, "not found"), (8, "must be a str or a Path"),
        (9, "memory_mb"), (10, "list of strings"),
    ]:  # fmt: skip
        assert complaint in results[index]["error"]
        assert results[index]["job_index"] == index
        assert results[index]["error_type"]
        assert results[index]["sandbox_id"] is None
    assert {config.memory_mb for config in backend.configs} == {222, 333, 444}
    assert not backend.alive


async def test_a_configuration_may_be_a_dict(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    assert (await executor.execute_agent("print(1)", config={"memory_mb": 256}))["success"]
    assert [config.memory_mb for config in backend.configs] == [256]
    with pytest.raises(ValueError, match="memory"):
        await executor.execute_agent("print(1)", config={"memory": 256})
    wrong: list[Any] = [256, "256m", ["memory_mb"]]
    for config in wrong:
        with pytest.raises(TypeError, match="SandboxConfig or a dict of its fields"):
            await executor.execute_agent("print(1)", config=config)
    # None of it occupies a slot.
    assert (await executor.execute_agent("print(1)"))["success"]


async def test_the_jobs_of_a_batch_may_come_from_anywhere(executor: SandboxExecutor) -> None:
    jobs = ({"agent_code": f"print({number})", "monitor": False} for number in range(3))
    results = await executor.execute_batch(jobs)
    assert [result["result"]["stdout"] for result in results] == ["0\n", "1\n", "2\n"]


@pytest.mark.parametrize(
    ("width", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("3", TypeError)]
)
async def test_a_batch_of_no_width_is_refused(
    executor: SandboxExecutor, width: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="max_concurrent must be"):
        await executor.execute_batch([{"agent_code": "print(1)"}], max_concurrent=width)


async def test_inputs_are_written_even_if_empty_and_only_as_json(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    code = "print(open('inputs.json').read())"
    assert (await executor.execute_agent(code, inputs={}))["result"]["stdout"] == "{}\n"
    assert not (await executor.execute_agent(code))["success"]
    made = len(backend.created)
    with pytest.raises(SandboxError, match="not JSON compliant"):
        await executor.execute_agent(code, inputs={"x": float("nan")})
    wrong: Any = "5"
    with pytest.raises(TypeError, match="timeout must be a number"):
        await executor.execute_agent(code, timeout=wrong)
    assert len(backend.created) == made


async def test_batch_waits_for_room_that_others_hold(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    held = [await executor.manager.create() for _ in range(3)]
    batch = asyncio.create_task(executor.execute_batch([{"agent_code": "print(1)"}] * 4))
    await asyncio.sleep(0.1)
    assert not batch.done()
    await executor.manager.destroy(held[0].sandbox_id)
    assert all(result["success"] for result in await batch)
    assert backend.peak == 3


async def test_batch_does_not_wait_for_what_it_keeps_itself(executor: SandboxExecutor) -> None:
    jobs = [{"agent_code": "1/0", "rollback_on_error": False, "monitor": False}] * 5
    async with asyncio.timeout(20):
        results = await executor.execute_batch(jobs)
    kept = [result for result in results if "error_type" not in result]
    assert len(kept) == 3
    refused = [result for result in results if result.get("error_type") == "SandboxLimitError"]
    assert [result["error"] for result in refused] == [
        "Maximum number of sandboxes (3) reached"
    ] * 2
    await executor.close()
    assert (await executor.execute_batch(jobs[:1]))[0]["result"]["exit_code"] == 1


async def test_a_cancelled_batch_leaves_nothing(
    executor: SandboxExecutor, backend: WatchedBackend
) -> None:
    jobs = [{"agent_code": "import time; time.sleep(60)"}] * 6
    batch = asyncio.create_task(executor.execute_batch(jobs))
    async with asyncio.timeout(5):
        while len(backend.alive) < 3:
            await asyncio.sleep(0.01)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert not backend.alive


async def test_no_room_for_a_single_execution_is_raised(executor: SandboxExecutor) -> None:
    for _ in range(3):
        await executor.manager.create()
    with pytest.raises(SandboxLimitError, match=r"Maximum number of sandboxes \(3\) reached"):
        await executor.execute_agent("print(1)")


async def test_health_check(executor: SandboxExecutor, backend: WatchedBackend) -> None:
    assert await executor.health_check() == {
        "available": True, "docker_available": False, "test_passed": True,
        "error": None, "backend": "fake",
    }  # fmt: skip
    assert not backend.alive
    backend.sick = True
    report = await executor.health_check()
    assert report["error"] == "The fake backend not available: it is sick. Cure it."
    assert (report["available"], report["test_passed"]) == (False, False)


async def test_health_check_without_an_engine() -> None:
    nowhere = Settings(docker_host="unix:///nowhere/docker.sock")
    async with SandboxManager(backend="docker", settings=nowhere) as manager:
        missing = await SandboxExecutor(manager).health_check()
    assert missing["available"] is False
    assert str(missing["error"]).count("Docker not available: ") == 1


async def test_health_check_uses_what_was_set(backend: WatchedBackend) -> None:
    backend.name = "docker"
    settings = load_settings({"DOCKER_SANDBOX_IMAGE": "own:1", "DOCKER_SANDBOX_MEMORY": "4g"})
    async with SandboxManager(backend=backend, settings=settings) as manager:
        assert (await SandboxExecutor(manager).health_check())["test_passed"]
    (config,) = backend.configs
    assert (config.base_image, config.memory_mb, config.timeout_seconds) == ("own:1", 256, 30)


async def test_an_executor_alone_makes_and_closes_its_manager(backend: WatchedBackend) -> None:
    executor = SandboxExecutor(backend=backend)
    assert (await executor.execute_agent("print(1)"))["success"]
    await executor.close()
    await executor.close()
    with pytest.raises(SandboxError, match="closed"):
        await executor.execute_agent("print(1)")
    with pytest.raises(ValueError, match="manager or a backend"):
        SandboxExecutor(SandboxManager(), backend=backend)
    assert isinstance(SandboxExecutor().manager, SandboxManager)


def test_an_exception_as_a_result() -> None:
    plain = error_result(SandboxCreationError("no", "id"))
    assert plain == {
        "success": False, "sandbox_id": "id", "error": "no", "error_type": "SandboxCreationError",
    }  # fmt: skip
    limit = error_result(ResourceLimitError("much", "id", "output", stdout="xx"), job_index=4)
    assert (limit["job_index"], limit["result"]["stdout"]) == (4, "xx")
    assert (limit["result"]["truncated"], limit["result"]["timed_out"]) == (True, False)
    assert error_result(ZeroDivisionError())["error"] == "ZeroDivisionError"


@pytest.mark.parametrize("length", [0, 200_000])
async def test_source_is_found_inside_as_it_was(tmp_path: Path, length: int) -> None:
    """Whether it travels in the request or is too long for that, and in whatever encoding."""
    file = tmp_path / "program.py"
    file.write_bytes(
        b"# -*- coding: latin-1 -*-\nimport sys\nname = 'P\xe4racle'\n"
        b"own = open(__file__, 'rb').read()\n"
        b"print(sys.argv[0][-14:], sys.argv[1:], name == 'P\\xe4racle', len(own))\n"
        b"raise ValueError(name)\n#" + b"\xe9" * length
    )
    async with SandboxExecutor(backend=FakeBackend()) as executor:
        result = await executor.execute_agent(file, args=["a"])
    size = file.stat().st_size
    assert result["result"]["stdout"] == f"/agent_code.py ['a'] True {size}\n"
    assert 'agent_code.py", line 6' in result["error"]
    assert "raise ValueError(name)" in result["error"]
