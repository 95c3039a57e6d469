"""Tests of programs that follow each other at once: the next one is forked while one runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene

from paracle_sandbox.errors import SandboxTimeoutError


async def test_after_one_that_was_killed_the_next_runs():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        for _ in range(10):
            for _ in range(3):
                assert (await sandbox.run_code("print(1)"))["stdout"] == "1\n"
            with pytest.raises(SandboxTimeoutError):
                await sandbox.run_code("while True: pass", timeout=0.2)
            result = await sandbox.run_code("print('next works')")
            assert (result["stdout"], result["exit_code"]) == ("next works\n", 0)
