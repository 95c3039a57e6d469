"""R16 with the kernel's own word: strace refuses one system call of the spawner or its children.

A spawner that cannot come up leaves its instance's name and its empty cgroup to the next start,
which is why these tests make one before they look for what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

import pytest
from hoststate import HostState, clean_since
from owners import helpers, usable
from test_failpoints import STEPS

from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.executor import SandboxExecutor

pytestmark = pytest.mark.skipif(
    not shutil.which("strace"), reason="strace is missing: apt install strace"
)

# While the spawner comes up.
AT_START = ["mount", "mount_setattr", "pivot_root", "umount2", "unshare"]
# In a child on its way to a sandbox: the call, and the steps that make it. The n-th call of a
# process is refused, for every n that there is.
IN_A_CHILD = {
    "unshare": ({"fork", "namespaces", "identity"}, 2),
    "setns": ({"fork"}, 1),
    "sethostname": ({"hostname"}, 1),
    "mount": ({"private mounts", "workspace", "devices", "proc"}, 20),
    "mount_setattr": ({"workspace", "proc"}, 4),
    "umount2": ({"workspace"}, 1),
    "prlimit64": ({"rlimits"}, 3),
    "setgroups": ({"identity"}, 1),
    "setresgid": ({"identity"}, 1),
    "setresuid": ({"identity"}, 1),
    "capset": ({"identity", "capabilities"}, 2),
    "prctl": (
        {"identity", "capabilities", "no_new_privs", "parent death", "seccomp", "dumpable"},
        12,
    ),
    "chdir": ({"working directory"}, 1),
    "landlock_add_rule": ({"landlock"}, 2),
    "landlock_restrict_self": ({"landlock"}, 1),
    "seccomp": ({"seccomp"}, 1),
    "close_range": ({"start"}, 1),
}
CASES = [(call, n) for call, (_, most) in IN_A_CHILD.items() for n in range(1, most + 1)]


async def assert_refused(manager, printed: list[str]) -> str:
    with pytest.raises(SandboxCreationError) as caught:
        await SandboxExecutor(manager).execute_agent(
            "print('user code ran')", on_stdout=printed.append
        )
    assert printed == []
    assert caught.value.step, caught.value
    return caught.value.step


def faulty_python(directory: Path, call: str, injection: str) -> str:
    """An interpreter that runs the spawner under strace, as a program to start."""
    real = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    trace = f"strace -f -qq -o {directory}/trace -e trace={call} -e inject={call}:{injection}"
    script = directory / "python"
    script.write_text(
        f"""#!/bin/sh
case "$*" in *jail.launch*) exec {trace} {real} "$@";; esac
exec {real} "$@"
"""
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("call", AT_START)
async def test_a_spawner_that_is_refused_a_call_does_not_come_up(place, managing, tmp_path, call):
    before = HostState.take(place)
    with contextlib.suppress(AssertionError):
        async with managing(python=faulty_python(tmp_path, call, "error=EPERM")) as manager:
            step = await assert_refused(manager, [])
    assert step in ("spawner", "pid namespace")
    assert "INJECTED" in (tmp_path / "trace").read_text(), "nothing was refused: nothing is shown"
    await usable(place)
    await clean_since(before, place)


async def test_under_strace_alone_user_code_runs(place, managing, tmp_path):
    printed: list[str] = []
    python = faulty_python(tmp_path, "kexec_load", "error=EPERM")
    async with managing(python=python) as manager:
        await SandboxExecutor(manager).execute_agent(
            "print('user code ran')", on_stdout=printed.append
        )
    assert "".join(printed) == "user code ran\n"


@contextlib.asynccontextmanager
async def refusing(pid: int, call: str, number: int, trace: Path):
    """The n-th such call of the process, and of each of its children, is refused."""
    strace = await asyncio.create_subprocess_exec(
        "strace", "-f", "-p", str(pid), "-o", str(trace), "-e", f"trace={call}",
        "-e", f"inject={call}:error=EPERM:when={number}",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert strace.stderr is not None
    try:
        assert b"attached" in await asyncio.wait_for(strace.stderr.readline(), 10)
        yield
    finally:
        strace.terminate()
        await strace.communicate()


@pytest.mark.parametrize(("call", "number"), CASES, ids=lambda value: str(value))
async def test_a_child_that_is_refused_a_call_never_runs_user_code(
    place, managing, tmp_path, call, number
):
    allowed, _ = IN_A_CHILD[call]
    assert allowed <= {*STEPS, "start"}, "a step was renamed"
    printed: list[str] = []
    async with managing() as manager:
        neighbour = await manager.create()
        _, spawner = helpers()
        async with refusing(spawner, call, number, tmp_path / "trace"):
            step = await assert_refused(manager, printed)
        assert step in allowed, (tmp_path / "trace").read_text()[-2000:]
        assert "INJECTED" in (tmp_path / "trace").read_text()
        # One child's failure is nobody else's, and the next one is made.
        assert (await neighbour.execute("echo well"))["stdout"] == "well\n"
        another = await manager.create()
        assert (await another.execute("echo well"))["stdout"] == "well\n"
