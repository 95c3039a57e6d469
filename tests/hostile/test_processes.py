"""Tests of processes and fork bombs (catalogue section A).

Every bomb has a pids limit of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from pressure import SLACK_SECONDS, Scene, is_alive, needs_root, until

from paracle_sandbox.errors import ResourceLimitError, SandboxTimeoutError
from paracle_sandbox.sandbox.command import Command
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.testing.fake import FakeBackend

pytestmark = needs_root

LIMIT = 48
SECONDS = 2.0

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
DEAF_FORK_BOMB = """
import os, signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
"""
PLAIN_FORK_BOMB = "import os\nwhile True:\n    os.fork()\n"
AS_MANY_AS_CAN_BE = """
import os, sys, threading, time
theirs, mine = os.pipe()
def fork():
    if os.fork() == 0:
        os.close(mine)
        os.read(theirs, 1)  # until the first one ends
        os._exit(0)
def thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    while True:
        {more}()
except (OSError, RuntimeError):
    print("full", flush=True)
    sys.stdin.read()
    raise
"""
MORE = {"fork": "BlockingIOError", "thread": "can't start new thread"}


@pytest.mark.case("A01", "A03")
@pytest.mark.parametrize("bomb", [FORK_BOMB, DEAF_FORK_BOMB], ids=["A01", "A03"])
@pytest.mark.clock
async def test_a_fork_bomb_stays_below_its_limit_and_leaves_no_survivor(bomb):
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=LIMIT)
        async with scene.neighbour(), scene.watching_pids(sandbox) as samples:
            started = time.monotonic()
            with pytest.raises(SandboxTimeoutError):
                await sandbox.run_code(bomb, timeout=SECONDS)
            took = time.monotonic() - started
            subprocess.run(["true"], check=True, timeout=5)  # the host can still fork
        assert max(samples) <= LIMIT
        assert max(samples) > LIMIT // 2, "the bomb did not go off: this test shows nothing"
        assert took < SECONDS + 2 + SLACK_SECONDS
        if sandbox.is_running:
            assert scene.programs(sandbox) == []
            assert (await sandbox.execute("echo well"))["stdout"] == "well\n"


@pytest.mark.case("A01")
async def test_a_bomb_that_fails_is_told_its_limit():
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=LIMIT)
        with pytest.raises(ResourceLimitError) as caught:
            await sandbox.run_code(PLAIN_FORK_BOMB, timeout=20)
        assert caught.value.resource_type == "pids"
        assert caught.value.limit == LIMIT
        assert 0 < caught.value.usage <= LIMIT
        await scene.manager.destroy(sandbox.sandbox_id)
        assert scene.survivors() == set()


async def refused(scene: Scene, command: Command) -> str:
    """Return the output of a program that ends at the limit.

    Where the kernel counts that, the count is checked, too.
    """
    if scene.witness.own_kernel:
        result = await command.wait()
        assert result["exit_code"] == 1
        return result["stderr"]
    with pytest.raises(ResourceLimitError) as caught:
        await command.wait()
    assert caught.value.resource_type == "pids"
    return caught.value.stderr


@pytest.mark.case("A01", "A02")
@pytest.mark.parametrize("more", MORE, ids=["A01-processes", "A02-threads"])
@pytest.mark.clock
async def test_processes_and_threads_are_counted_alike(more):
    full = asyncio.Event()
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=LIMIT)
        async with scene.neighbour():
            program = AS_MANY_AS_CAN_BE.format(more=more)
            command = await sandbox.start_code(
                program, stdin=True, on_stdout=lambda _: full.set(), timeout=30
            )
            await asyncio.wait_for(full.wait(), 30)
            assert LIMIT // 2 < scene.witness.tasks(sandbox) <= LIMIT
            await command.close_stdin()
            assert MORE[more] in await refused(scene, command)
        await until(lambda: scene.programs(sandbox) == [], 10, "they end with the first")
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"


@pytest.mark.case("A04")
@pytest.mark.clock
async def test_an_exec_bomb_gets_its_share_of_a_processor_and_ends_in_time():
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=0.5)
        await sandbox.write_file("again.sh", "exec sh again.sh\n")
        before, started = scene.cpu_seconds(sandbox), time.monotonic()
        with pytest.raises(SandboxTimeoutError):
            await sandbox.execute("exec sh again.sh", timeout=3)
        took = time.monotonic() - started
        assert took < 3 + 1 + SLACK_SECONDS
        used = scene.cpu_seconds(sandbox) - before
        assert 0.3 < used < 0.5 * took * 1.05 + 0.1


@pytest.mark.case("A05")
async def test_orphans_are_reaped_while_their_ancestor_runs():
    # The reaper may be slower than the forks, but never gives up: thirty times the limit.
    program = """
import os, time
made = 0
while made < 1500:
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:
                os._exit(0)
        except BlockingIOError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        made += 1
    else:
        time.sleep(0.01)
print("done")
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=LIMIT)
        async with scene.watching_pids(sandbox) as samples:
            result = await sandbox.run_code(program, timeout=60)
        assert result["stdout"] == "done\n", result["stderr"]
        assert max(samples) <= LIMIT
        # The result of a program comes before the kernel has freed all of it.
        await until(lambda: scene.programs(sandbox) == [], 10, "the last of them is gone")


@pytest.mark.case("A05")
async def test_zombies_count_and_go_with_their_parent():
    program = """
import os, time
try:
    for _ in range(10000):
        if os.fork() == 0:
            os._exit(0)
except OSError:
    print("full", flush=True)
    time.sleep(0.5)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=LIMIT)
        async with scene.watching_pids(sandbox) as samples:
            result = await sandbox.run_code(program, timeout=30)
        assert result["stdout"] == "full\n"
        assert max(samples) == LIMIT, "zombies were not counted: the limit was never met"
        await until(lambda: len(scene.witness.processes(sandbox)) < 6, 2, "the zombies are reaped")


KILL_ALL = """
import os, time
if os.fork() == 0:
    time.sleep(60)
os.kill(-1, 9)
print(os.waitstatus_to_exitcode(os.wait()[1]) * -1)
"""


@pytest.mark.case("A06")
async def test_killing_everything_visible_kills_only_the_own_command():
    async with Scene() as scene:
        sandbox, other = await scene.sandbox(), await scene.sandbox()
        with subprocess.Popen(["sleep", "60"]) as marker:
            try:
                elsewhere = await other.start_command(["sleep", "60"])
                result = await sandbox.run_code(KILL_ALL)
                # The call spares its caller. A command that loses its keeper reports a kill.
                assert (result["exit_code"], result["stdout"]) in [(0, "9\n"), (-9, "")]
                assert marker.poll() is None and elsewhere.poll() is None
                await elsewhere.kill()
                if sandbox.is_running:
                    assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
            finally:
                marker.kill()


@pytest.mark.case("A06")
def test_killing_everything_does_kill_what_is_visible():
    """The same program kills a marker that it can see, in a pid namespace that is thrown away."""
    program = "import os, subprocess\nsubprocess.Popen(['sleep', '60'])\n" + KILL_ALL
    program += "print(os.waitstatus_to_exitcode(os.wait()[1]) * -1)\n"
    apart = ["unshare", "-pf", "--kill-child"]
    done = subprocess.run(
        [*apart, sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout == "9\n9\n"


SCAN = """
import os, sys
marker, top, numbers = int(sys.argv[1]), int(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")]
own, found = {os.getpid(), os.getppid()}, []
for number in numbers:
    for pid in range(1, top):
        if number and pid in own:
            continue
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        found.append(pid)
print(marker in found, len(found))
"""


@pytest.mark.case("A07")
async def test_no_process_of_the_host_can_be_signalled():
    with open("/proc/sys/kernel/pid_max") as file:
        top = int(file.read()) + 1
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=2)
        with subprocess.Popen(["sleep", "600"]) as marker:
            try:
                args = [str(marker.pid), str(top), "0,9"]
                result = await sandbox.run_code(SCAN, args, timeout=200)
                seen, count = result["stdout"].split()
                assert seen == "False" and int(count) < 16, result
                assert marker.poll() is None
            finally:
                marker.kill()


@pytest.mark.case("A07")
async def test_the_scan_does_find_what_it_can_see():
    backend = FakeBackend()
    with subprocess.Popen(["sleep", "60"]) as marker:
        try:
            async with Sandbox(backend, "open") as sandbox:
                args = [str(marker.pid), str(marker.pid + 1), "0"]
                result = await sandbox.run_code(SCAN, args)
            assert result["stdout"].split()[0] == "True"
        finally:
            marker.kill()


@pytest.mark.parametrize("number", [9, 19, 15, 2], ids=["KILL", "STOP", "TERM", "INT"])
@pytest.mark.case("A09")
async def test_the_first_process_cannot_be_ended_or_stopped_from_inside(number):
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        init = scene.backend.init_pid(sandbox.sandbox_id)
        result = await sandbox.run_code(f"import os\nfor _ in range(50): os.kill(1, {number})\n")
        assert result["exit_code"] == 0
        assert is_alive(init)
        assert (await sandbox.execute("echo well", timeout=5))["stdout"] == "well\n"


@pytest.mark.case("A09")
@pytest.mark.clock
async def test_a_guest_that_is_stopped_all_the_same_does_not_block_the_manager():
    """The signal comes from outside. This is the positive control: here it does arrive."""
    async with Scene() as scene:
        sandbox, other = await scene.sandbox(), await scene.sandbox()
        os.kill(scene.backend.init_pid(sandbox.sandbox_id), 19)
        started = time.monotonic()
        with pytest.raises(SandboxTimeoutError):
            await sandbox.execute("echo never", timeout=1)
        assert time.monotonic() - started < 1 + 3 + 2 + SLACK_SECONDS
        assert (await other.execute("echo well"))["stdout"] == "well\n"


@pytest.mark.case("A10")
@pytest.mark.clock
async def test_priority_cannot_be_raised_and_buys_no_processor_time():
    program = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(action):
    try:
        action()
        return "got"
    except OSError:
        return "denied"
def ioprio():
    if libc.syscall(251, 1, 0, (1 << 13) | 0) < 0:
        raise OSError(ctypes.get_errno(), "ioprio_set")
print(tried(lambda: os.nice(-20)), os.getpriority(os.PRIO_PROCESS, 0) < 0,
      tried(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))),
      os.sched_getscheduler(0) == os.SCHED_FIFO, tried(ioprio))
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError:
    pass
for _ in range(3):
    os.fork()
end = time.monotonic() + 3
while time.monotonic() < end:
    pass
os._exit(0)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=0.5)
        before, started = scene.cpu_seconds(sandbox), time.monotonic()
        result = await sandbox.run_code(program, timeout=30)
        took = time.monotonic() - started
        words = result["stdout"].splitlines()[0].split()
        if not scene.witness.own_kernel:  # the kernel may allow it: it is its own priority then
            assert words[1:] == ["False", "denied", "False", "denied"]
        used = scene.cpu_seconds(sandbox) - before
        assert 0.5 < used < 0.5 * took * 1.05 + 0.1
