"""R02, R16: the owner is killed at every step of creating a sandbox, and every step is made to
fail."""

from __future__ import annotations

import ast
import asyncio
import signal
from pathlib import Path

import pytest
from hoststate import HostState, clean_since
from owners import cpu_seconds, helpers, usable

import paracle_sandbox
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.executor import SandboxExecutor

JAIL = Path(paracle_sandbox.__file__).parent / "jail"


def steps() -> list[str]:
    """Return every ``step("name")`` of the jail's source, so that a new step is tested once it is
    there."""
    found = []
    # The steps inside an engine's instance have no failpoint.
    for path in sorted(set(JAIL.rglob("*.py")) - set((JAIL / "instance").iterdir())):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "step":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), "the name of a step must be a literal"
                found.append(argument.value)
    return found


STEPS = steps()


def test_the_steps_were_found():
    assert len(STEPS) == len(set(STEPS)) >= 20
    assert {"record", "cgroup", "fork", "namespaces", "identity", "seccomp", "limits"} <= set(STEPS)


@pytest.mark.parametrize("step", STEPS)
async def test_an_owner_killed_at_a_step_leaves_nothing(place, owner, step):
    before = HostState.take(place)
    async with owner("create", PARACLE_FAILPOINTS=f"{step}=kill-owner") as process:
        said = await process.lines()
        assert process.process.returncode == -signal.SIGKILL, said
        assert "starting" in said[0] and not any("output" in line for line in said)
    await clean_since(before, place, but_records=True)
    await usable(place)
    await clean_since(before, place)


async def test_an_owner_that_is_not_killed_does_run_user_code(place, owner):
    async with owner("create") as process:
        said = await process.lines()
        assert said[-1] == {"output": "user code ran\n"} and process.process.returncode == 0


@pytest.mark.parametrize("stock", [0, 2], ids=["cold", "stocked"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_fails_fails_closed(place, managing, step, stock):
    printed: list[str] = []
    async with managing(failpoints=(step,), stock=stock) as manager:
        with pytest.raises(SandboxCreationError) as caught:
            await SandboxExecutor(manager).execute_agent(
                "print('user code ran')", on_stdout=printed.append
            )
        assert caught.value.step == step
        assert step in str(caught.value)
        assert await manager.backend.list_sandboxes() == []
    assert printed == []


@pytest.mark.parametrize("step", ["seccomp", "volume"])
async def test_a_stock_that_cannot_be_filled_is_not_tried_for_ever(place, managing, step):
    async with managing(failpoints=(step,), stock=4) as manager:
        with pytest.raises(SandboxCreationError):
            await manager.create()
        _, spawner = helpers()
        before = cpu_seconds(spawner)
        await asyncio.sleep(2.0)
        assert cpu_seconds(spawner) - before < 0.5
