"""Every limit of a native sandbox is measured on the host: reached, named correctly, and limited to
it.

Each limit ends in its own error, with what was used and what was allowed. The same program under a
larger limit succeeds, so each test could fail.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import MIB, SLACK_SECONDS, Scene, needs_root

from paracle_sandbox.errors import ResourceLimitError, SandboxTimeoutError
from paracle_sandbox.sandbox.sandbox import Sandbox

pytestmark = [needs_root, pytest.mark.clock]

HOLD = """
import os, sys, time
size, processes, where = int(sys.argv[1]) << 20, int(sys.argv[2]), sys.argv[3]
def hold():
    if where == "memory":
        held = bytearray(b"x") * size
    else:
        with open("%s/%d" % (where, os.getpid()), "wb", buffering=0) as file:
            for _ in range(size >> 20):
                file.write(b"x" * (1 << 20))
    time.sleep(0.7)
children = []
for _ in range(processes - 1):
    child = os.fork()
    if not child:
        hold()
        os._exit(0)
    children.append(child)
hold()
assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
print("held")
"""


async def limit_reached(run, kind: str, limit: float) -> ResourceLimitError:
    with pytest.raises(ResourceLimitError) as caught:
        await run
    error = caught.value
    assert (error.resource_type, error.limit) == (kind, limit), error
    assert error.usage is not None and error.usage > 0
    assert kind in str(error).lower() or (kind == "pids" and "process" in str(error).lower())
    return error


@pytest.mark.parametrize(
    ("size", "processes", "where"),
    [(200, 1, "memory"), (30, 8, "memory"), (200, 1, "/dev/shm")],
    ids=["one process", "children together", "shared memory"],
)
async def test_memory(size, processes, where):
    arguments = [str(size), str(processes), where]
    async with Scene() as scene:
        tight, roomy = await scene.sandbox(memory_mb=128), await scene.sandbox(memory_mb=512)
        async with scene.neighbour():
            run = tight.run_code(HOLD, arguments, timeout=60)
            error = await limit_reached(run, "memory", 128 * MIB)
        assert 0.9 * error.limit < error.usage <= error.limit + 4 * MIB
        assert scene.memory_peak(tight) <= 128 * MIB + 4 * MIB
        assert (await roomy.run_code(HOLD, arguments, timeout=60))["stdout"] == "held\n"
        assert (await tight.execute("echo well"))["stdout"] == "well\n"


async def share_of_two_busy_processes(scene: Scene, sandbox: Sandbox) -> float:
    """Return the share of a core that two busy processes get together."""
    busy = "import os\nos.fork()\nwhile True: pass\n"
    async with scene.neighbour():
        started, before = time.monotonic(), scene.cpu_seconds(sandbox)
        with pytest.raises(SandboxTimeoutError):
            await sandbox.run_code(busy, timeout=3.5)
        used = scene.cpu_seconds(sandbox) - before
    return used / (time.monotonic() - started)


async def test_two_busy_processes_share_half_a_core():
    async with Scene() as scene:
        half, two = await scene.sandbox(cpu_cores=0.5), await scene.sandbox(cpu_cores=2)
        # A machine with other work may have less time for either, but not on each attempt.
        for _ in range(6):
            share = await share_of_two_busy_processes(scene, half)
            assert 0 < share < 0.55
            if await share_of_two_busy_processes(scene, two) > max(0.4, share) * 1.15:
                return
        raise AssertionError("a larger quota is worth no more: nothing is shown here")


CROWD = """
import os, time
theirs, ours = os.pipe()
for _ in range(400):
    if os.fork() == 0:
        os.close(ours)
        os.read(theirs, 1)  # all begin at once: those that are there would starve who makes more
        while True:
            pass
os.close(ours)
print("busy", flush=True)
while True:
    time.sleep(1)
"""


async def seconds_to_remove_a_crowd(cpu_cores: float) -> float:
    busy = asyncio.Event()
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=cpu_cores, max_processes=500, memory_mb=4096)
        await sandbox.start_code(CROWD, on_stdout=lambda _: busy.set())
        await asyncio.wait_for(busy.wait(), 100)
        assert scene.witness.tasks(sandbox) > 400
        started = time.monotonic()
        await scene.manager.destroy(sandbox.sandbox_id)
        took = time.monotonic() - started
        assert scene.survivors() == set()
    return took


async def test_a_crowd_dies_as_fast_with_little_of_a_processor():
    """Dying takes processor time, too: half a minute at a tenth of a processor."""
    with_much = await seconds_to_remove_a_crowd(2)
    assert await seconds_to_remove_a_crowd(0.1) < 3 * with_much + 8


async def test_processes():
    program = """
import os, sys, time
children = []
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if not child:
        time.sleep(1)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
print("all")
"""
    async with Scene() as scene:
        tight, roomy = await scene.sandbox(max_processes=32), await scene.sandbox(max_processes=128)
        async with scene.neighbour(), scene.watching_pids(tight) as samples:
            run = tight.run_code(program, ["64"], timeout=60)
            error = await limit_reached(run, "pids", 32)
        assert error.usage <= 32 and max(samples) <= 32
        assert (await roomy.run_code(program, ["64"], timeout=60))["stdout"] == "all\n"


FILES = """
import sys
for number in range(int(sys.argv[1])):
    with open("%07d" % number, "wb") as file:
        file.write(b"x" * int(sys.argv[2]))
print("written")
"""


@pytest.mark.parametrize(
    ("count", "size", "fits"),
    [("400", str(MIB), "200"), ("400000", "1500", "20000")],
    ids=["bytes", "many small files"],
)
async def test_disk(count, size, fits):
    async with Scene() as scene:
        full, fine = await scene.sandbox(disk_mb=256), await scene.sandbox(disk_mb=256)
        async with scene.neighbour():
            run = full.run_code(FILES, [count, size], timeout=250)
            error = await limit_reached(run, "disk", 256 * MIB)
        assert 0.9 * error.limit < error.usage <= 1.02 * error.limit
        assert (await fine.run_code(FILES, [fits, size], timeout=60))["stdout"] == "written\n"
        # A full disk is not a broken one.
        assert (await full.execute("rm -f 00*; echo well"))["stdout"] == "well\n"


FILL = "head -c 400M /dev/zero > big"


async def test_a_full_disk_is_not_to_blame_for_every_failure():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=256)
        await limit_reached(sandbox.execute(FILL, timeout=60), "disk", 256 * MIB)
        assert (await sandbox.execute("grep zzz /etc/hostname"))["exit_code"] == 1
        await limit_reached(sandbox.execute("cp big more"), "disk", 256 * MIB)
        await sandbox.execute("rm -f big more")
        # The kernel counts removed files for some seconds.
        result = await sandbox.execute("echo unrelated >&2; exit 1")
        assert (result["exit_code"], result["stderr"]) == (1, "unrelated\n")
        await sandbox.check_limits()


async def test_a_disk_filled_without_a_word_and_one_made_free_again():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=256)
        freed = f"{FILL} 2>/dev/null; rm big; exit 3"
        assert (await sandbox.execute(freed, timeout=60))["exit_code"] == 3
        silent = f"{FILL} 2>/dev/null"
        await limit_reached(sandbox.execute(silent, timeout=60), "disk", 256 * MIB)


async def test_the_workspace_is_not_memory():
    """900 MB of files with 512 MB of memory kill no process."""
    async with Scene() as scene:
        sandbox = await scene.sandbox(memory_mb=512, disk_mb=1024)
        async with scene.neighbour():
            result = await sandbox.run_code(FILES, ["900", str(MIB)], timeout=200)
        assert result["stdout"] == "written\n"
        assert (await sandbox.get_stats())["disk_mb"] > 890
        read = await sandbox.execute("cat 0* | wc -c", timeout=200)
        assert int(read["stdout"]) == 900 * MIB


async def test_output():
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_output_mb=1)
        async with scene.neighbour():
            error = await limit_reached(sandbox.execute("yes", timeout=60), "output", MIB)
        assert error.usage > MIB and len(error.stdout) == MIB
        result = await sandbox.execute("yes | head -c 1000000")
        assert len(result["stdout"]) == 1_000_000 and not result["truncated"]


async def test_time():
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        started = time.monotonic()
        async with scene.neighbour():
            started = time.monotonic()
            with pytest.raises(SandboxTimeoutError) as caught:
                await sandbox.execute("echo begun; sleep 60", timeout=1)
            took = time.monotonic() - started
        assert 1 <= took < 2 + SLACK_SECONDS
        assert caught.value.timeout_seconds == 1 and caught.value.stdout == "begun\n"
        assert (await sandbox.execute("sleep 0.2; echo ended", timeout=10))["stdout"] == "ended\n"


async def test_limits_of_one_sandbox_are_not_another_s():
    """All run at once, and each ends by its own limit."""
    async with Scene() as scene:
        boxes = [
            await scene.sandbox(memory_mb=128, max_processes=32, max_output_mb=1) for _ in range(4)
        ]
        hog = HOLD.replace("time.sleep(0.7)", "pass")
        outcomes = await asyncio.gather(
            boxes[0].run_code(hog, ["200", "1", "memory"], timeout=60),
            boxes[1].execute("yes", timeout=60),
            boxes[2].execute("sleep 60", timeout=1.5),
            boxes[3].execute("sleep 1; echo well", timeout=60),
            return_exceptions=True,
        )
        assert [getattr(outcome, "resource_type", None) for outcome in outcomes[:2]] == [
            "memory",
            "output",
        ]
        assert isinstance(outcomes[2], SandboxTimeoutError)
        assert outcomes[3]["stdout"] == "well\n"
