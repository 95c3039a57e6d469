"""Checks of limits: each covers the whole sandbox, and meeting one is reported by its name."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable

from ...config import SandboxConfig
from ...errors import ResourceLimitError, SandboxError
from ...sandbox.sandbox import Sandbox
from .case import Case
from .expect import contains, equal, eventually, expect, fail, raises
from .registry import check

_MB = 1 << 20
_SMALL_MB = 128


async def _expect_limit_error(work: Awaitable[object], resource: str) -> ResourceLimitError:
    error = await raises(ResourceLimitError, work)
    equal(error.resource_type, resource)
    return error


async def _expect_usable_or_gone(sandbox: Sandbox) -> None:
    """Expect that the sandbox works or says that it is gone, and neither hangs nor lies."""
    try:
        equal(await sandbox.run_command("echo alive", timeout=100), "alive\n")
    except SandboxError as error:
        expect(not sandbox.is_running, f"it runs, but {error}")


@check(quick=True, needs=("memory",))
async def too_much_memory(case: Case) -> None:
    """Allocating more than memory_mb is a ResourceLimitError, not an exit code 137."""
    sandbox = await case.sandbox(memory_mb=_SMALL_MB)
    code = "print('begun', flush=True)\nx = bytearray(b'1') * (1 << 30)\nprint('not reached')"
    error = await _expect_limit_error(sandbox.run_code(code), "memory")
    contains(str(error), "Memory limit")
    equal(error.limit, _SMALL_MB * _MB, "limit")
    expect(error.usage is not None and error.usage > 0.7 * _SMALL_MB * _MB, f"usage {error.usage}")
    equal(error.stdout, "begun\n", "what it had printed")
    await _expect_usable_or_gone(sandbox)


@check(needs=("memory",))
async def too_much_memory_in_children(case: Case) -> None:
    """The memory of all processes counts together, also if the parent lives on."""
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        x = bytearray(b"1") * (40 << 20)
        time.sleep(1000)
os.waitpid(-1, 0)
time.sleep({seconds})
"""
    for seconds in (1000, 1):
        sandbox = await case.sandbox(memory_mb=_SMALL_MB)
        work = sandbox.run_code(code.format(seconds=seconds), timeout=200)
        await _expect_limit_error(work, "memory")
        await _expect_usable_or_gone(sandbox)


@check(needs=("memory",))
async def too_much_memory_in_files(case: Case) -> None:
    """Files in /dev/shm count as memory."""
    sandbox = await case.sandbox(memory_mb=_SMALL_MB)
    code = """
block = b"1" * (1 << 20)
with open("/dev/shm/file", "wb", buffering=0) as file:
    try:
        for _ in range(96):
            file.write(block)
    except OSError:
        pass
x = bytearray(b"1") * (100 << 20)
"""
    await _expect_limit_error(sandbox.run_code(code), "memory")
    await _expect_usable_or_gone(sandbox)


@check(needs=("memory",))
async def just_enough_memory(case: Case) -> None:
    """A program within the limit runs, and an exit code of 137 alone is no limit error."""
    sandbox = await case.sandbox(memory_mb=256)
    result = await sandbox.run_code("x = bytearray(b'1') * (150 << 20); print(len(x))")
    equal(result["stdout"], f"{150 << 20}\n")
    equal((await sandbox.execute("exit 137"))["exit_code"], 137)
    equal((await sandbox.execute("kill -9 $$"))["exit_code"], -9)


_FORKS = """
import os, time
alive = 0
try:
    while alive < 200:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        alive += 1
finally:
    print(alive, flush=True)
"""


@check(needs=("pids",))
async def processes_are_limited(case: Case) -> None:
    """No more than max_processes can be alive, and a refused fork is reported as such."""
    sandbox = await case.sandbox(max_processes=24)
    try:
        result = await sandbox.run_code(_FORKS)
    except ResourceLimitError as error:
        count = error.stdout
    else:
        expect(result["exit_code"], "200 processes were made")
        count = result["stdout"]
    expect(0 < int(count) < 24, f"{count} processes were made")
    try:
        equal(await sandbox.run_command("echo alive"), "alive\n")
    except ResourceLimitError as error:  # the forked processes may live on and fill the limit
        equal(error.resource_type, "pids")
    equal(await sandbox.list_files(), [], "files can be used all the same")


@check(needs=("pids_told",))
async def too_many_processes(case: Case) -> None:
    """A program that fails because it may not fork is a ResourceLimitError."""
    sandbox = await case.sandbox(max_processes=24)
    error = await _expect_limit_error(sandbox.run_code(_FORKS), "pids")
    equal(error.limit, 24, "limit")
    contains(error.stderr, "BlockingIOError")
    equal(await sandbox.run_command("echo alive"), "alive\n")


@check(needs=("pids",))
async def threads_count_as_processes(case: Case) -> None:
    """Threads cannot get around max_processes."""
    sandbox = await case.sandbox(max_processes=24)
    code = (
        "import threading, time\nn = 0\ntry:\n    while n < 200:\n"
        "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); n += 1\n"
        "except RuntimeError:\n    pass\nprint(n, flush=True)\nimport os; os._exit(0)\n"
    )
    count = int((await sandbox.run_code(code))["stdout"])
    expect(0 < count < 24, f"{count} threads were made")


@check(needs=("disk",))
async def too_much_disk(case: Case) -> None:
    """Writing more than disk_mb is a ResourceLimitError; after a removal writing works again."""
    sandbox = await case.sandbox(disk_mb=256, memory_mb=1024)
    fill = "head -c 400M /dev/zero >filled"
    error = await _expect_limit_error(sandbox.execute(fill, timeout=200), "disk")
    equal(error.limit, 256 * _MB, "limit")
    size = (await sandbox.stat("filled"))["size"]
    expect(size <= 256 * _MB, f"{size} bytes were written")
    expect(size > 128 * _MB, f"only {size} bytes could be written")
    await raises(ResourceLimitError, sandbox.check_limits())
    await sandbox.remove("filled")

    async def room() -> bool:
        return (await sandbox.execute("head -c 50M /dev/zero >small"))["exit_code"] == 0

    await eventually(room, "there is no room after the file was removed")


@check(needs=("disk",))
async def too_much_disk_from_the_host(case: Case) -> None:
    """A copy that does not fit is a ResourceLimitError, and leaves no part of the file."""
    sandbox = await case.sandbox(disk_mb=256, memory_mb=1024)
    source = case.directory / "large"
    with source.open("wb") as file:
        file.truncate(400 * _MB)
    error = await _expect_limit_error(sandbox.copy_to(source, "large"), "disk")
    equal((error.limit, error.usage), (256 * _MB, 256 * _MB))
    equal(await sandbox.exists("large"), False)
    await sandbox.write_file("small", "fits")
    equal(await sandbox.read_file("small"), "fits")


@check(needs=("disk",))
async def temporary_files_count(case: Case) -> None:
    """/tmp is limited too."""
    sandbox = await case.sandbox(disk_mb=256, memory_mb=1024)
    work = sandbox.execute("head -c 400M /dev/zero >/tmp/filled", timeout=200)
    await _expect_limit_error(work, "disk")


@check(needs=("disk", "disk_apart"))
async def disk_is_not_memory(case: Case) -> None:
    """More than memory_mb can be stored, up to disk_mb, by one and the same sandbox."""
    sandbox = await case.sandbox(disk_mb=1024, memory_mb=_SMALL_MB)
    result = await sandbox.execute("head -c 400M /dev/zero >large; wc -c <large", timeout=200)
    equal(result["stdout"], f"{400 * _MB}\n", result["stderr"])


@check(needs=("cpu", "usage"))
async def cpu_is_limited(case: Case) -> None:
    """Two busy processes at cpu_cores=0.5 use half a core together."""
    sandbox = await case.sandbox(cpu_cores=0.5)
    busy = [await sandbox.start_code("while True: pass") for _ in range(2)]
    shares: list[float] = []
    # A busy machine gives less than the limit for a while, but never more.
    for _ in range(12):
        shares.append(await _measure_cpu_share(case, sandbox, seconds=2.5))
        expect(shares[-1] <= 0.5 * 1.25, f"{shares[-1]:.2f} cores were used")
        if shares[-1] >= 0.5 * 0.75:
            break
    else:
        fail(f"never more than {max(shares):.2f} cores were given")
    for command in busy:
        await command.kill()


async def _measure_cpu_share(case: Case, sandbox: Sandbox, seconds: float) -> float:
    began = time.monotonic()
    before = await case.backend.usage(sandbox.sandbox_id)
    await asyncio.sleep(seconds)
    after = await case.backend.usage(sandbox.sandbox_id)
    return (after.cpu_seconds - before.cpu_seconds) / (time.monotonic() - began)


@check(needs=("memory", "usage"))
async def stats_are_of_this_sandbox(case: Case) -> None:
    """get_stats() has its limits, and figures that make sense."""
    sandbox = await case.sandbox(memory_mb=256, disk_mb=512)
    stats = await sandbox.get_stats()
    equal((stats["memory_limit_mb"], stats["disk_limit_mb"]), (256, 512))
    expect(0 < stats["memory_mb"] < 128, f"memory {stats['memory_mb']} MB")
    expect(0 < stats["memory_percent"] < 50, f"memory {stats['memory_percent']} %")
    expect(stats["memory_peak_mb"] >= stats["memory_mb"] * 0.9, "the peak is below the present")
    expect(stats["processes"] >= 1, "no process")
    # Usage cannot exceed the processors, and making the sandbox is not part of the first figures.
    most = 120 * (os.cpu_count() or 1)
    expect(stats["cpu_percent"] <= most, f"{stats['cpu_percent']} % of CPU")
    expect(stats["duration_seconds"] > 0, "no time has passed")
    await sandbox.check_limits()


@check()
async def impossible_limits_are_refused(case: Case) -> None:
    """Limits out of range are a ValueError before anything is made."""
    wrong = {"cpu_cores": (0.05, 20.0), "memory_mb": (64, 20_000), "disk_mb": (255, 10_241),
             "timeout_seconds": (9, 3_601), "cleanup_timeout": (4, 301),
             "network_mode": ("foo",)}  # fmt: skip
    for field, values in wrong.items():
        for value in values:
            try:
                SandboxConfig(**{field: value})  # type: ignore[arg-type]
            except ValueError:
                continue
            fail(f"{field}={value!r} was taken")
