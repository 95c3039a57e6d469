"""Tests of processor time and of evading the clock (catalogue section C)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest
from pressure import SLACK_SECONDS, Scene, needs_root, until

from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxTimeoutError

pytestmark = [needs_root, pytest.mark.clock]

DEAF_LOOP = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
print("spinning", flush=True)
while True:
    pass
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(0.01)
    os._exit(0)
os.wait()
print("gone", flush=True)
"""


async def stopped_in_time(run, seconds: float) -> SandboxTimeoutError:
    started = time.monotonic()
    with pytest.raises(SandboxTimeoutError) as caught:
        await run
    took = time.monotonic() - started
    assert seconds * 0.95 < took < seconds + 1 + SLACK_SECONDS, f"it took {took:.2f} s"
    assert caught.value.timeout_seconds == seconds
    return caught.value


@pytest.mark.case("C01")
async def test_a_loop_that_ignores_signals_ends_at_its_deadline():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        async with scene.neighbour():
            error = await stopped_in_time(sandbox.run_code(DEAF_LOOP, timeout=1.5), 1.5)
        assert error.stdout == "spinning\n"
        assert scene.programs(sandbox) == []


@pytest.mark.case("C02")
async def test_a_daemon_does_not_hold_its_command_up_and_ends_with_the_sandbox():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        started = time.monotonic()
        result = await sandbox.run_code(DAEMON, timeout=30)
        assert result["stdout"] == "gone\n" and time.monotonic() - started < 5
        # The program's end is reported before it is gone.
        await until(lambda: len(scene.programs(sandbox)) == 1, 5, "the daemon is alone, and lives")
        assert scene.survivors(), "the daemon is not found: nothing is shown here"
        await scene.manager.destroy(sandbox.sandbox_id)
        assert scene.survivors() == set()


@pytest.mark.case("C02")
async def test_a_daemon_ends_with_its_command_when_that_is_stopped():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        forever = DAEMON + "time.sleep(1000)\n"
        await stopped_in_time(sandbox.run_code(forever, timeout=1.0), 1.0)
        assert scene.programs(sandbox) == []


@pytest.mark.parametrize("target", ["os.getpid()", "0"], ids=["self", "group"])
@pytest.mark.case("C04")
async def test_stopped_programs_meet_their_deadline(target):
    program = f"""
import os, signal, time
for _ in range(3):
    if os.fork() == 0:
        time.sleep(1000)
print("stopping", flush=True)
os.kill({target}, signal.SIGSTOP)
time.sleep(1000)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        error = await stopped_in_time(sandbox.run_code(program, timeout=1.0), 1.0)
        assert error.stdout == "stopping\n"
        assert scene.programs(sandbox) == []


@pytest.mark.case("C05")
async def test_children_born_while_the_tree_is_killed_die_too():
    program = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def breed():
    while True:
        try:
            if os.fork():
                time.sleep(0.001)
                os._exit(0)
            os.setsid()
        except OSError:
            time.sleep(0.001)
for _ in range(8):
    if os.fork() == 0:
        breed()
while True:
    time.sleep(1)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=64)
        for _ in range(5):
            if not sandbox.is_running:
                break  # allowed: it was destroyed because they could not be overtaken
            await stopped_in_time(sandbox.run_code(program, timeout=0.5), 0.5)
            assert not sandbox.is_running or scene.programs(sandbox) == []


# This program takes the descriptors and the processor time of all other processes, as far as it
# can: above all of the one that is to kill it.
STARVE = """
import os, resource, signal
open("/proc/self/comm", "w").write("hinders")
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(0.05)
def starve(pid):
    for attempt in (
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda: os.setpriority(os.PRIO_USER, 0, 19),
    ):
        try:
            attempt()
        except OSError:
            pass
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        starve(int(name))
"""
# Each of these processes forks the next one, which leaves its group, and exits. That takes little
# longer than the guest needs to read the list of processes. It is machine code, which shares its
# memory with the next process, because Python forks too slowly. (A pause; clone; exit the parent,
# setsid the child; again.)
COMETS = """
import ctypes, mmap, os
open("/proc/self/comm", "w").write("hinders")
for pause in (20_000, 50_000, 100_000, 200_000, 400_000):
    if os.fork() == 0:
        os.close(1)
        os.close(2)
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex(
            "b9" + pause.to_bytes(4, "little").hex() + "e2fe"
            "b838000000bf1101000031f631d24d31d24d31c00f0585c0740b78dd"
            "b83c00000031ff0f05b8700000000f05ebcb"))
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
MANY_BESIDE = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        break
else:
    print("there", flush=True)
time.sleep(1000)
"""
# The number of processes that the guest may have forked after a command, ahead of the next one.
OF_OURS = 2
HINDRANCES = {"starved": STARVE, "comets": COMETS}


@pytest.mark.parametrize("how", HINDRANCES)
@pytest.mark.case("C01", "C05")
async def test_a_program_that_hinders_its_own_end_ends(how):
    """It runs beside another command: otherwise all processes are killed at once, without a
    walk."""
    program = "import time\n" + HINDRANCES[how] + "print('begun', flush=True)\ntime.sleep(1000)\n"
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_processes=900)
        many = "20" if scene.witness.own_kernel else "400"
        beside = await sandbox.start_code(MANY_BESIDE, [many])
        async for _ in beside.output():
            break
        with pytest.raises(SandboxTimeoutError) as caught:
            await sandbox.run_code(program, timeout=1.0)
        assert caught.value.stdout == "begun\n"
        if "destroyed" in str(caught.value):
            return  # the end of every scene shows that nothing is left
        # A starved guest may have ended since then, and its sandbox with it.
        with contextlib.suppress(OSError):
            assert [one for one in scene.programs(sandbox) if "hinders" in one] == []
            before, born = set(scene.witness.processes(sandbox)), set()
            for _ in range(20):  # a process that is gone before it is seen has left another one
                born |= set(scene.witness.processes(sandbox)) - before
                await asyncio.sleep(0.005)
            assert len(born) <= OF_OURS, "they go on"


@pytest.mark.case("C06")
async def test_a_parent_that_waits_uninterruptibly_is_killed():
    """vfork keeps the parent in an uninterruptible wait until the child has ended."""
    program = """
import ctypes, os
libc = ctypes.CDLL(None)
pid = libc.syscall(58)  # vfork
while True:
    libc.pause()
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        with contextlib.suppress(SandboxTimeoutError):
            await sandbox.run_code(program, timeout=1.0)
        assert scene.programs(sandbox) == []
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"


@pytest.mark.case("C07")
async def test_sixty_four_busy_processes_share_one_quota():
    program = "import os\nfor _ in range(6): os.fork()\nwhile True: pass\n"
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=1.0, max_processes=100)
        async with scene.neighbour():
            before, started = scene.cpu_seconds(sandbox), time.monotonic()
            with pytest.raises(SandboxTimeoutError):
                await sandbox.run_code(program, timeout=4)
            used, took = scene.cpu_seconds(sandbox) - before, time.monotonic() - started
        assert 0.5 < used < 1.0 * took * 1.05 + 0.15, f"{used:.2f} s of processor in {took:.2f} s"


@pytest.mark.case("C08")
async def test_the_clock_cannot_be_changed():
    program = """
import ctypes, errno, time
libc = ctypes.CDLL(None, use_errno=True)
class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]
moment = Timespec(int(time.time()) + 3600, 0)
libc.clock_settime(0, ctypes.byref(moment))
print(errno.errorcode[ctypes.get_errno()])
buffer = ctypes.create_string_buffer(512)
buffer[0:4] = (0x4000).to_bytes(4, "little")
ctypes.set_errno(0)
print(libc.adjtimex(buffer) < 0, errno.errorcode.get(ctypes.get_errno()))
print(libc.unshare(0x80), errno.errorcode[ctypes.get_errno()])
print(int(time.time()))
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        drift = time.time() - time.monotonic()
        result = await sandbox.run_code(program, timeout=20)
        first, second, third, now = result["stdout"].splitlines()
        assert first in ("EPERM", "ENOSYS")
        assert second.split()[0] == "True" and second.split()[1] in ("EPERM", "ENOSYS")
        if not scene.witness.own_kernel:  # another kernel would have its own clock
            assert third.split()[0] == "-1" and third.split()[1] in ("EPERM", "ENOSYS")
        assert abs(int(now) - time.time()) < 30
        assert abs((time.time() - time.monotonic()) - drift) < 1


@pytest.mark.case("C10")
async def test_sleeping_is_limited_too_and_only_the_owner_may_wait_for_ever():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        await stopped_in_time(sandbox.run_code("import time\ntime.sleep(10**9)\n", timeout=1), 1)
        for timeout in (0, -1, float("nan"), float("-inf")):
            with pytest.raises(ValueError, match="timeout"):
                await sandbox.execute("true", timeout=timeout)
    assert SandboxConfig().timeout_seconds <= 3600
    for seconds in (0, -1, 10**9):
        with pytest.raises(ValueError, match="timeout_seconds"):
            SandboxConfig(timeout_seconds=seconds)


@pytest.mark.case("C11")
async def test_a_program_that_ends_at_its_deadline_has_exactly_one_outcome():
    """There is never a lost exit status and never a hang, whichever side is first."""
    rounds = int(os.environ.get("PARACLE_JITTER_ROUNDS", "120"))
    outcomes = {"ended": 0, "timed out": 0}
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=2)

        async def once(number: int) -> None:
            seconds = 0.2 + (number % 11 - 5) / 1000
            try:
                program = ["sh", "-c", f"sleep {seconds}; exit 7"]
                result = await sandbox.execute(program, timeout=0.205)
                assert result["exit_code"] == 7 and not result["timed_out"]
                outcomes["ended"] += 1
            except SandboxTimeoutError:
                outcomes["timed out"] += 1

        async with asyncio.timeout(rounds * 2):
            for start in range(0, rounds, 4):
                await asyncio.gather(*(once(start + turn) for turn in range(4)))
        assert sum(outcomes.values()) == rounds
        assert (await sandbox.execute("exit 7"))["exit_code"] == 7


async def test_the_heartbeat_of_a_neighbour_does_notice():
    """The witness of every case above is shown something that it must complain about."""
    async with Scene() as scene:
        with pytest.raises(AssertionError, match="p99|answered"):
            async with scene.neighbour():
                for _ in range(4):
                    time.sleep(1.2)  # this manager does nothing else meanwhile
                    await asyncio.sleep(0)
