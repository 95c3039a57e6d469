"""Checks of stopping: deadlines, kills and cancellation end the whole tree, and nothing else."""

from __future__ import annotations

import asyncio
import signal

from ...errors import SandboxNotFoundError, SandboxTimeoutError
from ...sandbox.command import Command
from ...sandbox.sandbox import Sandbox
from .case import Case
from .expect import contains, equal, eventually, expect, fail, raises
from .registry import check

# Four processes that are hard to kill, each of which records its pid: a plain child, one in a
# session of its own, one orphaned by a double fork, and one that ignores signals.
_TREE = """\
import os, signal, time
def note():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
def child(prepare):
    if os.fork() == 0:
        prepare()
        note()
        while True:
            time.sleep(1000)
def orphan():
    os.setsid()
    if os.fork():
        os._exit(0)
def deaf():
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
for prepare in (lambda: None, os.setsid, orphan, deaf):
    child(prepare)
note()
print("begun", flush=True)
while True:
    time.sleep(1000)
"""
_TREE_SIZE = 5
# To find and kill these, the guest needs descriptors: each is in a session of its own.
_STARVING = """\
import os, resource, time
for pid in (1, os.getppid()):
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
    except OSError:
        pass
for number in range(20):
    if os.fork() == 0:
        os.setsid()
        while number < 2:
            pass
        time.sleep(1000)
print("begun", flush=True)
time.sleep(1000)
"""
# Two of them spin: they use up to two cores, and nothing once they are gone.
_QUIET_SECONDS, _QUIET_CPU = 1.0, 0.1
_ALIVE = """\
import os, sys
for pid in open("pids").read().split():
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        continue
    print(pid)
"""


async def _read_pids(sandbox: Sandbox) -> list[str]:
    if not await sandbox.exists("pids"):
        return []
    return (await sandbox.read_file("pids")).split()


async def _wait_for_tree(sandbox: Sandbox) -> None:
    async def complete() -> bool:
        return len(await _read_pids(sandbox)) == _TREE_SIZE

    await eventually(complete, "the tree of processes did not start")
    alive = (await sandbox.run_code(_ALIVE))["stdout"].split()
    equal(len(alive), _TREE_SIZE, "processes alive before the kill")


async def _expect_tree_gone(sandbox: Sandbox) -> None:
    async def gone() -> bool:
        return (await sandbox.run_code(_ALIVE))["stdout"] == ""

    await eventually(gone, "processes survived", seconds=20)


async def _run_tree_into_timeout(sandbox: Sandbox) -> SandboxTimeoutError:
    """Let a tree meet its deadline. A busy machine may need a longer one to start the tree."""
    for seconds in (1.0, 5.0, 25.0, 100.0):
        await sandbox.write_file("pids", "")
        error = await raises(SandboxTimeoutError, sandbox.run_code(_TREE, timeout=seconds))
        equal(error.timeout_seconds, seconds)
        if len(await _read_pids(sandbox)) == _TREE_SIZE:
            break
    else:
        fail("the tree of processes did not start in time")
    return error


@check(quick=True)
async def a_timeout_is_typed(case: Case) -> None:
    """A program that does not end in time is a SandboxTimeoutError with what it had printed."""
    sandbox = await case.sandbox()
    for seconds in (1.0, 5.0, 25.0):
        work = sandbox.execute("echo begun; echo why >&2; sleep 1000", timeout=seconds)
        error = await raises(SandboxTimeoutError, work)
        if error.stderr:
            break
    expect(isinstance(error, TimeoutError), "it is no TimeoutError")
    contains(str(error), "timed out")
    equal((error.stdout, error.stderr), ("begun\n", "why\n"), "what it had printed")
    equal(error.timeout_seconds, seconds)
    equal(error.sandbox_id, sandbox.sandbox_id)
    equal(await sandbox.run_command("echo next"), "next\n")


@check()
async def a_timeout_kills_the_whole_tree(case: Case) -> None:
    """Nothing that a program started survives its deadline, however it hides."""
    sandbox = await case.sandbox()
    error = await _run_tree_into_timeout(sandbox)
    equal(error.stdout, "begun\n", "what it had printed")
    await _expect_tree_gone(sandbox)


@check(needs=("processes", "usage"))
async def a_timeout_kills_what_hinders_it(case: Case) -> None:
    """A program that takes descriptors from the process that kills it ends at its deadline."""
    for seconds in (1.0, 5.0, 25.0):
        sandbox = await case.sandbox()
        # Another command runs beside it: otherwise the guest kills every process without a search.
        await sandbox.start_command("sleep 1000")
        error = await raises(SandboxTimeoutError, sandbox.run_code(_STARVING, timeout=seconds))
        if error.stdout == "begun\n":
            break
    else:
        fail("its processes did not start in time")

    async def cpu_seconds() -> float:
        return (await case.backend.usage(sandbox.sandbox_id)).cpu_seconds

    async def gone() -> bool:
        try:
            before = await cpu_seconds()
            await asyncio.sleep(_QUIET_SECONDS)
            return await cpu_seconds() - before < _QUIET_CPU
        except SandboxNotFoundError:  # the sandbox was destroyed with everything in it
            return True

    await eventually(gone, "processes survived", seconds=20)


@check()
async def a_timeout_spares_other_commands(case: Case) -> None:
    """Another command of the same sandbox goes on as if nothing had happened."""
    sandbox = await case.sandbox()
    async with await sandbox.start_command("cat", stdin=True) as other:
        await raises(SandboxTimeoutError, sandbox.execute("sleep 1000", timeout=0.5))
        equal(other.poll(), None, "exit code of the other")
        await other.write_stdin("still here")
        await other.close_stdin()
        equal((await other.wait())["stdout"], "still here")


@check()
async def a_busy_loop_is_stopped(case: Case) -> None:
    """Code that never sleeps and makes no calls is stopped too."""
    sandbox = await case.sandbox()
    await raises(SandboxTimeoutError, sandbox.run_code("while True: pass", timeout=1))
    await raises(SandboxTimeoutError, sandbox.execute("yes >/dev/null", timeout=1))
    equal((await sandbox.run_code("print('next')"))["stdout"], "next\n")


@check()
async def kill_takes_the_whole_tree(case: Case) -> None:
    """kill() returns when the command and everything it started are gone."""
    sandbox = await case.sandbox()
    command = await sandbox.start_code(_TREE)
    await _wait_for_tree(sandbox)
    await command.kill()
    expect(command.poll(), "the exit code is 0")
    await _expect_tree_gone(sandbox)
    equal((await command.wait())["exit_code"], -signal.SIGKILL)
    await command.kill()


@check()
async def cancelling_kills_the_whole_tree(case: Case) -> None:
    """A cancelled execute() leaves nothing running, and the sandbox usable."""
    sandbox = await case.sandbox()
    await sandbox.write_file("tree.py", _TREE)
    task = asyncio.create_task(sandbox.execute(["python3", "tree.py"]))
    await _wait_for_tree(sandbox)
    task.cancel()
    await raises(asyncio.CancelledError, task)
    await _expect_tree_gone(sandbox)


@check()
async def killing_all_programs(case: Case) -> None:
    """kill_programs() ends every command with its whole tree; files and the sandbox stay."""
    sandbox = await case.sandbox()
    await sandbox.write_file("kept", "as it was")
    commands = [await sandbox.start_code(_TREE)]
    await _wait_for_tree(sandbox)
    commands.append(await sandbox.start_command("echo up; sleep 1000"))
    await _wait_until_begun(commands[-1])
    await sandbox.kill_programs()
    await _expect_tree_gone(sandbox)
    for command in commands:
        equal((await command.wait())["exit_code"], -signal.SIGKILL)
    equal(await sandbox.read_file("kept"), "as it was")
    equal((await sandbox.execute("echo again"))["stdout"], "again\n")


@check()
async def leaving_the_block_kills(case: Case) -> None:
    """``async with`` a command ends it on the way out."""
    sandbox = await case.sandbox()
    async with await sandbox.start_code(_TREE) as command:
        await _wait_for_tree(sandbox)
    expect(command.poll() is not None, "it still runs")
    await _expect_tree_gone(sandbox)


@check()
async def background_commands(case: Case) -> None:
    """poll() is None while it runs; wait(timeout) gives up on waiting, not on the command."""
    sandbox = await case.sandbox()
    command = await sandbox.start_command("read line; echo got $line; exit 7", stdin=True)
    equal(command.poll(), None)
    error = await raises(TimeoutError, command.wait(timeout=0.05))
    expect(not isinstance(error, SandboxTimeoutError), "waiting stopped it")
    equal(sandbox.in_use, 1, "operations under way")
    await command.write_stdin("it\n")
    result = await command.wait()
    equal((result["exit_code"], result["stdout"]), (7, "got it\n"))
    equal((await command.wait())["exit_code"], 7, "a second wait")
    equal(command.poll(), 7)
    equal(sandbox.in_use, 0, "operations under way")


async def _wait_until_begun(command: Command) -> None:
    async for _ in command.output():
        return


@check()
async def signals_reach_the_program(case: Case) -> None:
    """send_signal() reaches the program, which may handle it."""
    sandbox = await case.sandbox()
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    command = await sandbox.start_command(script)
    await _wait_until_begun(command)
    await command.send_signal(signal.SIGTERM)
    result = await command.wait()
    equal((result["exit_code"], result["stdout"]), (5, "ready\ncaught\n"))


@check()
async def writing_to_the_dead_is_a_broken_pipe(case: Case) -> None:
    """write_stdin() after the end is a BrokenPipeError."""
    sandbox = await case.sandbox()
    command = await sandbox.start_command("true", stdin=True)
    await command.wait()
    await raises(BrokenPipeError, command.write_stdin("late"))
