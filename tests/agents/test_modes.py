"""What a mode stands for, and that code of an agent runs where its configuration says."""

from __future__ import annotations

import pytest

from paracle_sandbox import SandboxConfig
from paracle_sandbox.agents.modes import MODES, execute_for, run_config, sandbox_problem
from paracle_sandbox.settings import Settings, load_settings


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    config = run_config(mode)
    assert config["sandbox"] is (mode != "safe")
    assert config["auto_approve"] is (mode == "yolo")
    assert config["requires_approval"] is (mode == "review")


async def test_code_runs_in_a_sandbox_or_not_at_all() -> None:
    code = "import os; print(os.getcwd())"
    inside = await execute_for(run_config("sandbox"), code, None, SandboxConfig())
    assert inside["success"] and inside["result"]["stdout"] == "/workspace\n"
    for config in (run_config("safe"), run_config("yolo", on_host=True)):
        refused = await execute_for(config, code)
        assert not refused["success"] and "not run" in refused["error"]
        assert "result" not in refused


async def test_whether_there_is_a_sandbox() -> None:
    assert await sandbox_problem("native", load_settings()) is None
    problem = await sandbox_problem("daytona", Settings(daytona_key=None))
    assert problem is not None and "daytona" in problem
