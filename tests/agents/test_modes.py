"""Each mode has its configuration, and code of an agent runs where that says."""

from __future__ import annotations

import pytest

from paracle_sandbox import SandboxConfig
from paracle_sandbox.agents import modes
from paracle_sandbox.agents.modes import MODES, execute_for, find_sandbox_problem, make_run_config
from paracle_sandbox.backends import registry
from paracle_sandbox.backends.base import Health
from paracle_sandbox.settings import Settings, load_settings


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    config = make_run_config(mode)
    assert config["sandbox"] is (mode != "safe")
    assert config["auto_approve"] is (mode == "yolo")
    assert config["requires_approval"] is (mode == "review")


async def test_code_runs_in_a_sandbox_or_not_at_all() -> None:
    code = "import os; print(os.getcwd())"
    inside = await execute_for(make_run_config("sandbox"), code, None, SandboxConfig())
    assert inside["success"] and inside["result"]["stdout"] == "/workspace\n"
    for config in (make_run_config("safe"), make_run_config("yolo", on_host=True)):
        refused = await execute_for(config, code)
        assert not refused["success"] and "not run" in refused["error"]
        assert "result" not in refused


async def test_whether_there_is_a_sandbox() -> None:
    assert await find_sandbox_problem("native", load_settings()) is None
    problem = await find_sandbox_problem("daytona", Settings(daytona_key=None))
    assert problem is not None and "daytona" in problem


async def test_only_the_backend_that_will_be_used_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under ``auto`` others may work: they are of no use to a run that does not take them, and to
    ask them makes a sandbox with each."""
    monkeypatch.setattr(registry, "PROBLEMS", {"native": _no, "docker": _yes, "incus": _no})
    asked = []

    async def refusing(name: str | None, settings: Settings) -> list[Health]:
        asked.append(name)
        return [Health(str(name), name == "native", "it is broken")]

    monkeypatch.setattr(modes, "examine", refusing)
    assert await find_sandbox_problem(None, Settings(mode="auto")) == "docker: it is broken"
    assert await find_sandbox_problem("auto", Settings(mode="native")) == "docker: it is broken"
    assert asked == ["docker", "docker"]


def _no(_: Settings) -> str | None:
    return "not here"


def _yes(_: Settings) -> str | None:
    return None
