"""R02, R16: the owner killed at every step of creating a sandbox, and every step made to fail."""

from __future__ import annotations

import ast
import asyncio
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hoststate import HostState, clean_since
from owners import cpu_seconds, helpers, usable

import paracle_sandbox
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.executor import SandboxExecutor

JAIL = Path(paracle_sandbox.__file__).parent / "jail"


def steps() -> list[str]:
    """Every ``step("name")`` of the jail's source, so that a new step is tested when it is made."""
    found = []
    for path in sorted(JAIL.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "step":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), "the name of a step must be a literal"
                found.append(argument.value)
    return found


STEPS = steps()


def test_the_steps_were_found():
    assert len(STEPS) == len(set(STEPS)) >= 20
    assert {"record", "cgroup", "fork", "namespaces", "identity", "seccomp", "name"} <= set(STEPS)


@pytest.mark.parametrize("step", STEPS)
async def test_an_owner_killed_at_a_step_leaves_nothing(place, owner, step):
    before = HostState.take(place)
    async with owner("create", PARACLE_FAILPOINTS=f"{step}=kill-owner") as process:
        said = await process.lines()
        assert process.process.returncode == -signal.SIGKILL, said
        assert "starting" in said[0] and not any("output" in line for line in said)
    await clean_since(before, place)
    await usable(place)


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


# Real refusals of the kernel, put in by strace between the spawner and the system call.

REFUSED = {
    "mount": "mount:error=EPERM",
    "mount in the child": "mount:error=EPERM:when=40+",
    "pivot_root": "pivot_root:error=EPERM",
    "mount_setattr": "mount_setattr:error=EPERM",
    "unshare": "unshare:error=EPERM",
    "second unshare of a child": "unshare:error=EPERM:when=2",
    "prctl": "prctl:error=EPERM",
    "setresuid": "setresuid:error=EPERM",
    "setresgid": "setresgid:error=EPERM",
    "setgroups": "setgroups:error=EPERM",
    "capset": "capset:error=EPERM",
    "landlock_create_ruleset": "landlock_create_ruleset:error=EPERM:when=2+",
    "landlock_restrict_self": "landlock_restrict_self:error=EPERM",
    "seccomp": "seccomp:error=EPERM",
    "prlimit": "prlimit64:error=EPERM",
    "setns": "setns:error=EPERM",
    "sethostname": "sethostname:error=EPERM",
    "umount": "umount2:error=EPERM",
}


def faulty_python(directory: Path, injection: str) -> str:
    """An interpreter whose system calls are refused by strace, as a program to start."""
    real = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    name = injection.partition(":")[0]
    script = directory / "python"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *jail.launch*) ;; *) exec %s "$@";; esac\n'
        "exec strace -f -qq -o %s -e trace=%s -e inject=%s %s \"$@\"\n"
        % (real, directory / "trace", name, injection, real)
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is missing: apt install strace")
@pytest.mark.parametrize("what", REFUSED)
async def test_a_system_call_that_is_refused_fails_closed(place, managing, tmp_path, what):
    tools = tmp_path / "tools"
    tools.mkdir()
    printed: list[str] = []
    python = faulty_python(tools, REFUSED[what])
    async with managing(python=python) as manager:
        with pytest.raises(SandboxCreationError) as caught:
            await SandboxExecutor(manager).execute_agent(
                "print('user code ran')", on_stdout=printed.append
            )
    assert "INJECTED" in (tools / "trace").read_text(), "nothing was refused: nothing is shown"
    assert printed == []
    assert caught.value.step, caught.value


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is missing: apt install strace")
async def test_under_strace_alone_user_code_runs(place, managing, tmp_path):
    python = faulty_python(tmp_path, "kexec_load:error=EPERM")
    printed: list[str] = []
    async with managing(python=python) as manager:
        await SandboxExecutor(manager).execute_agent(
            "print('user code ran')", on_stdout=printed.append
        )
    assert "".join(printed) == "user code ran\n"
