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
from owners import helpers, usable, zygote
from test_failpoints import STEPS

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import SandboxCreationError
from paracle_sandbox.executor import SandboxExecutor
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.skipif(
    not shutil.which("strace"), reason="strace is missing: apt install strace"
)

# These calls happen while the spawner comes up.
AT_START = ["mount", "mount_setattr", "pivot_root", "umount2", "unshare"]
# These happen in a child on its way to a sandbox, each with the steps that make the call.
IN_A_CHILD = {
    "unshare": {"fork", "namespaces", "identity"},
    "setns": {"fork"},
    "sethostname": {"hostname"},
    "mount": {"private mounts", "workspace", "devices", "proc"},
    "mount_setattr": {"workspace", "proc"},
    "umount2": {"workspace"},
    "prlimit64": {"rlimits"},
    "setgroups": {"identity"},
    "setresgid": {"identity"},
    "setresuid": {"identity"},
    "capset": {"identity", "capabilities"},
    "prctl": {"identity", "capabilities", "no_new_privs", "parent death", "landlock", "seccomp",
              "dumpable"},
    "chdir": {"working directory"},
    "landlock_create_ruleset": {"landlock", "start"},
    "landlock_add_rule": {"landlock"},
    "landlock_restrict_self": {"landlock"},
    "seccomp": {"seccomp"},
    "close_range": {"start"},
    "clone": {"fork"},
}  # fmt: skip
# A child mounts less often. Dropping the bounding set alone takes forty calls, which are all alike.
# Of some calls only the first is the child's; the others are the guest's, which is confined by
# then.
MOST_CALLS = 32
ONLY_FIRST = ("setns", "chdir", "close_range", "clone")
# The first call only asks for the version. If it is refused, there is no Landlock.
FIRST = {"landlock_create_ruleset": 2}


def faulty_python(directory: Path, call: str, injection: str) -> str:
    """Write an interpreter that runs the spawner under strace, as a program to start."""
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
async def test_a_spawner_that_is_refused_a_call_does_not_come_up(place, tmp_path, call):
    before = HostState.take(place)
    backend = NativeBackend(place.settings(python=faulty_python(tmp_path, call, "error=EPERM")))
    async with SandboxManager(backend=backend) as manager:
        step = await attempt(manager)
    await backend.close()
    assert step in ("spawner", "pid namespace")
    assert "INJECTED" in (tmp_path / "trace").read_text(), "nothing was refused: nothing is shown"
    await usable(place)
    await clean_since(before, place)


@pytest.mark.parametrize("answer", ["error=EOPNOTSUPP", "retval=1"])
async def test_health_does_not_claim_a_layer_that_the_kernel_does_not_give(place, tmp_path, answer):
    """Landlock is missing or too old. Sandboxes run without it, whatever else reports it."""
    layers, missing = [], []
    for python in ("", faulty_python(tmp_path, "landlock_create_ruleset", answer)):
        backend = NativeBackend(place.settings(python=python))
        found = {layer.name: layer for layer in (await backend.health()).layers}
        layers.append(found["landlock"])
        async with SandboxManager(backend=backend) as manager:
            result = await SandboxExecutor(manager).execute_agent("print(1)")
            missing.append("landlock" in result["posture"]["missing"])
        await backend.close()
    usual, refused = layers
    if not usual.in_force:
        pytest.skip("this kernel has no Landlock")
    assert not refused.in_force and refused.detail and "5.19" in refused.remedy
    assert missing == [False, True], "every result says so, too"


async def test_under_strace_alone_user_code_runs(place, managing, tmp_path):
    printed: list[str] = []
    python = faulty_python(tmp_path, "kexec_load", "error=EPERM")
    async with managing(python=python) as manager:
        await SandboxExecutor(manager).execute_agent(
            "print('user code ran')", on_stdout=printed.append
        )
    assert "".join(printed) == "user code ran\n"


@contextlib.asynccontextmanager
async def refusing(pid: int, call: str, number: int, trace: Path, *, children: bool = True):
    """Refuse the n-th such call of the process, and of each of its children, by strace."""
    strace = await asyncio.create_subprocess_exec(
        "strace", *(["-f"] if children else []), "-p", str(pid), "-o", str(trace),
        "-e", f"trace={call}", "-e", f"inject={call}:error=EPERM:when={number}",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert strace.stderr is not None
    try:
        assert b"attached" in await asyncio.wait_for(strace.stderr.readline(), 10)
        yield
    finally:
        strace.terminate()
        await strace.communicate()


@pytest.mark.parametrize("call", IN_A_CHILD)
async def test_a_child_that_is_refused_a_call_never_runs_user_code(place, managing, tmp_path, call):
    """The first such call is refused, then the second, until no further one can be."""
    assert IN_A_CHILD[call] <= {*STEPS, "start"}, "a step was renamed"
    async with managing() as manager:
        neighbour = await manager.create()
        parent = zygote()
        first = FIRST.get(call, 1)
        for number in range(first, MOST_CALLS + 1):
            trace = tmp_path / f"trace-{number}"
            async with refusing(parent, call, number, trace):
                refused = await attempt(manager)
            if "INJECTED" not in trace.read_text():
                assert refused is None
                break
            assert refused in IN_A_CHILD[call], trace.read_text()[-2000:]
            # The failure of one child does not affect the others.
            assert (await neighbour.execute("echo well"))["stdout"] == "well\n"
            if call in ONLY_FIRST:
                break
        assert "INJECTED" in (tmp_path / f"trace-{first}").read_text(), "nothing is shown"
        if call == "setns":
            return  # it is the zygote's own: it forks no more and reports that
        another = await manager.create()
        assert (await another.execute("echo well"))["stdout"] == "well\n"


async def test_a_write_that_is_refused_ends_the_start(managing, tmp_path):
    """The writes go to the files of its groups and limits and to the maps of its user namespace.

    The first such write is refused, then the second, of the spawner and of the child.
    """
    async with managing() as manager:
        neighbour = await manager.create()
        for who, steps in (
            (helpers()[1], {"record", "limits"}),
            (zygote(), {"cgroup attach", "identity"}),
        ):
            met = set()
            for number in range(1, MOST_CALLS + 1):
                trace = tmp_path / f"trace-{who}-{number}"
                step = None
                async with refusing(who, "write", number, trace, children=who == zygote()):
                    try:
                        await manager.create()
                    except SandboxCreationError as error:
                        step = error.step
                before, refused, _ = trace.read_text().partition("(INJECTED)")
                if not refused:
                    break
                # The spawner's write into the group that it is in only makes the next one quick.
                assert step in steps or '"0", 1)' in before.splitlines()[-1], before
                met.add(step)
            assert met >= steps and step is None
            assert (await neighbour.execute("echo well"))["stdout"] == "well\n"


async def test_what_cannot_be_looked_at_does_not_stay_in_view(managing, tmp_path):
    """All files of /proc that exist are hidden, so it has to be known whether they exist."""
    async with managing() as manager:
        usual = mount_points(manager, await manager.create())
        assert "/proc/cmdline" in usual
        number = 0
        while True:
            number += 1
            trace = tmp_path / f"trace-{number}"
            sandbox = None
            async with refusing(zygote(), "%%stat", number, trace):
                with contextlib.suppress(SandboxCreationError):
                    sandbox = await manager.create()
            assert sandbox is None or mount_points(manager, sandbox) == usual, trace.read_text()
            if "INJECTED" not in trace.read_text():
                break
        assert sandbox is not None and number > 10, "nothing is shown"


def mount_points(manager: SandboxManager, sandbox: Sandbox) -> list[str]:
    lines = Path(f"/proc/{manager.backend.init_pid(sandbox.sandbox_id)}/mountinfo").read_text()
    return [line.split()[4] for line in lines.splitlines()]


async def attempt(manager: SandboxManager) -> str | None:
    """Return the step that failed; None if user code ran."""
    printed: list[str] = []
    run = SandboxExecutor(manager).execute_agent
    try:
        await run("print('user code ran')", on_stdout=printed.append)
    except SandboxCreationError as error:
        assert printed == []
        return error.step
    assert "".join(printed) == "user code ran\n"
    return None
