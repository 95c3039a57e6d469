"""The text of a program does not outlive it: no later program finds it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

import pytest
from pressure import Scene

from paracle_sandbox import SandboxError, SandboxFileError, SandboxTimeoutError

TEXTS = "import os; print(sum(name.startswith('.paracle-') for name in os.listdir('/tmp')))"


async def test_whoever_looks_after_a_program_finds_no_text_of_it():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        await sandbox.run_code("print(1)")
        assert await sandbox.list_files("/tmp") == []
        await sandbox.run_code("print(1)")
        assert (await sandbox.execute("ls -A /tmp"))["stdout"] == ""


async def test_large_ones_and_failed_ones_go_too():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        large = "# " + "x" * 300_000 + "\n"
        assert (await sandbox.run_code(large + "print(1)"))["stdout"] == "1\n"
        assert (await sandbox.execute(large + "echo 2"))["stdout"] == "2\n"
        with pytest.raises(SandboxFileError):
            await sandbox.run_code("print(3)", cwd="/nowhere")
        with pytest.raises(SandboxTimeoutError):
            await sandbox.run_code("while True: pass", timeout=0.5)
        assert await sandbox.list_files("/tmp") == []


async def test_a_text_that_is_gone_and_a_request_that_is_refused():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        await sandbox.run_code("import os; os.unlink(__file__)")
        assert await sandbox.list_files("/tmp") == []
        with pytest.raises(SandboxError):
            await sandbox.execute("# " + "x" * 300_000, env={"A": "\ud800"})
        assert await sandbox.list_files("/tmp") == []


async def test_a_large_one_that_is_never_run_goes_too():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        large = "#" * (1 << 20)
        for turns in range(0, 60, 2):  # turns of the loop, until the text is on its way
            for attempt in (sandbox.execute(large), sandbox.run_code(large)):
                task = asyncio.create_task(attempt)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(ValueError, match="timeout"):
            await sandbox.execute(large, timeout=-1)
        await sandbox.execute("true")
        assert await sandbox.list_files("/tmp") == []


async def test_what_a_program_puts_beside_its_text_stays():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        beside = "import os; open(os.path.join(os.path.dirname(__file__), 'mine'), 'w').close()"
        assert (await sandbox.run_code(beside))["exit_code"] == 0
        found = await sandbox.list_files("/tmp", recursive=True)
        assert [one["name"] for one in found if one["kind"] == "file"] == ["mine"]


async def test_texts_go_when_nobody_looks():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        for _ in range(3):
            await sandbox.run_code("print(1)")
        deadline = asyncio.get_running_loop().time() + 10
        while (await sandbox.run_code(TEXTS))["stdout"] != "1\n":  # its own
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)
