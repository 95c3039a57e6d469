"""The text of a program does not outlive it: nobody who looks finds it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene

TEXTS = "import os; print(sum(name.startswith('.paracle-') for name in os.listdir('/tmp')))"


async def test_whoever_looks_after_a_program_finds_no_text_of_it():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        await sandbox.run_code("print(1)")
        assert await sandbox.list_files("/tmp") == []
        await sandbox.run_code("print(1)")
        assert (await sandbox.execute("ls -A /tmp"))["stdout"] == ""


async def test_texts_go_when_nobody_looks():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        for _ in range(3):
            await sandbox.run_code("print(1)")
        deadline = asyncio.get_running_loop().time() + 10
        while (await sandbox.run_code(TEXTS))["stdout"] != "1\n":  # its own
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)
