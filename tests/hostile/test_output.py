"""Tests of output floods and encodings (catalogue section E)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from pressure import MIB, SLACK_SECONDS, Scene, needs_root, resident_bytes

from paracle_sandbox.errors import ResourceLimitError, SandboxTimeoutError

pytestmark = needs_root


class Peak:
    """Measure by the kernel's own counter how far our memory grows meanwhile."""

    async def __aenter__(self):
        self._start = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
        return self

    async def __aexit__(self, *_):
        highest = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        self.growth = int(highest) * 1024 - self._start


@pytest.mark.case("E01", "E02", "E03")
@pytest.mark.parametrize(
    ("flood", "is_text"),
    [
        ("yes", True),
        ("yes >&2", True),
        ("head -c 1000000000 /dev/zero", True),
        ("cat /dev/urandom", False),
    ],
    ids=["E01-stdout", "E02-stderr", "E03-one-line", "E01-no-text"],
)
@pytest.mark.clock
async def test_a_flood_ends_at_the_limit_and_costs_the_host_little(flood, is_text):
    async with Scene() as scene:
        cap = 32 * MIB
        sandbox = await scene.sandbox(max_output_mb=32)
        async with scene.neighbour(), Peak() as peak:
            with pytest.raises(ResourceLimitError) as caught:
                await sandbox.execute(flood, timeout=30)
            error = caught.value
            if is_text:
                assert len(error.stdout) + len(error.stderr) == cap
        assert error.resource_type == "output"
        assert error.limit == cap and error.usage > error.limit
        # Either the bytes or their text are kept, with a window under way; not both, nor the flood.
        assert peak.growth < 2 * cap, f"{peak.growth >> 20} MiB"
        # Bytes that are no text take more memory as text, which is only made when it is read.
        assert error.stdout or error.stderr
        assert scene.programs(sandbox) == []
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"


@pytest.mark.case("E01")
async def test_output_below_the_limit_is_all_there():
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_output_mb=4)
        result = await sandbox.execute("yes | head -c 4000000")
        assert result["stdout"] == "y\n" * 2_000_000 and not result["truncated"]


@pytest.mark.case("E01")
async def test_a_flood_that_is_consumed_flows_without_filling_memory():
    seen = 0

    def consume(name: str, data: bytes) -> None:
        nonlocal seen
        seen += len(data)
        assert len(data) <= 4 * MIB

    async with Scene() as scene:
        sandbox = await scene.sandbox(max_output_mb=1)
        async with Peak() as peak:
            with pytest.raises(SandboxTimeoutError):
                await sandbox.execute("yes", timeout=3, on_output_bytes=consume)
        assert seen > 50 * MIB and peak.growth < 32 * MIB


@pytest.mark.parametrize("pause", [0.2, 30])
@pytest.mark.case("E01")
@pytest.mark.clock
async def test_a_slow_reader_stalls_the_writer_and_the_deadline_still_holds(pause):
    async def slowly(name: str, data: bytes) -> None:
        await asyncio.sleep(pause)

    async with Scene() as scene:
        sandbox = await scene.sandbox(max_output_mb=1)
        started = time.monotonic()
        async with Peak() as peak:
            with pytest.raises(SandboxTimeoutError):
                await sandbox.execute("yes", timeout=2, on_output_bytes=slowly)
        assert time.monotonic() - started < 2 + 2 + SLACK_SECONDS
        assert peak.growth < 32 * MIB
        assert scene.programs(sandbox) == []


@pytest.mark.case("E02")
async def test_single_bytes_on_both_streams_do_not_deadlock():
    program = """
import os
for _ in range(20000):
    os.write(1, b"o")
    os.write(2, b"e")
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        result = await sandbox.run_code(program, timeout=60)
        assert (result["stdout"], result["stderr"]) == ("o" * 20000, "e" * 20000)


@pytest.mark.case("E02")
async def test_a_full_stderr_does_not_hide_stdout():
    program = """
import os, threading
def flood():
    for _ in range(40):
        os.write(2, b"e" * 65536)
thread = threading.Thread(target=flood)
thread.start()
thread.join()
os.write(1, b"last words")
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        result = await sandbox.run_code(program, timeout=30)
        assert result["stdout"] == "last words" and len(result["stderr"]) == 40 * 65536


@pytest.mark.case("E04")
async def test_bytes_are_exact_and_text_is_declared():
    hostile = bytes(range(256)) * 64 + b"\xed\xa0\x80 lone" + "€".encode() * 5000 + b"\0\xe2\x82"
    program = f"""
import os
data = {hostile!r}
for start in range(0, len(data), 7):
    os.write(1, data[start:start + 7])
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        pieces: list[str] = []
        command = await sandbox.start_code(program, on_stdout=pieces.append)
        result = await command.wait()
        assert command.stdout_bytes == hostile
        assert result["stdout"] == hostile.decode("utf-8", "replace")
        assert "".join(pieces) == result["stdout"], "a character was cut at a border of chunks"
        assert json.loads(json.dumps(result)) == result


@pytest.mark.case("E07")
async def test_no_descriptor_is_there_to_write_to():
    program = """
import errno, os
got = []
for fd in range(3, 1024):
    try:
        os.write(fd, b"HTTP/1.1 200 OK\\r\\n")
        got.append(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            got.append((fd, error.errno))
print(got)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        for _ in range(3):  # this also holds for a program that was forked ahead
            assert (await sandbox.run_code(program))["stdout"] == "[]\n"
        await sandbox.write_file("probe.py", program)
        assert (await sandbox.execute("python3 probe.py"))["stdout"] == "[]\n"
        shown = await sandbox.execute("exec 5>/dev/null; python3 probe.py")
        assert shown["stdout"] == "[5]\n", "the probe must see a descriptor that is there"


@pytest.mark.case("E08")
async def test_a_huge_traceback_is_bounded_by_size():
    program = "raise ValueError('x' * 10_000_000)\n"
    async with Scene() as scene:
        sandbox = await scene.sandbox(max_output_mb=1)
        with pytest.raises(ResourceLimitError) as caught:
            await sandbox.run_code(program, timeout=30)
        assert caught.value.resource_type == "output"
        roomy = await scene.sandbox()
        result = await roomy.run_code(program, timeout=30)
        assert result["exit_code"] == 1 and len(result["stderr"]) > 10_000_000


@pytest.mark.case("E08")
async def test_an_exception_that_never_finishes_its_text_is_bounded_by_time():
    program = """
class Endless(Exception):
    def __str__(self):
        while True:
            pass
    __repr__ = __str__
raise Endless
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        with pytest.raises(SandboxTimeoutError):
            await sandbox.run_code(program, timeout=2)
        recursive = "a = []\na.append(a)\nraise ValueError(a)\n"
        result = await sandbox.run_code(recursive, timeout=20)
        assert result["exit_code"] == 1 and "[[...]]" in result["stderr"]
