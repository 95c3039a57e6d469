"""The usage of a sandbox without a cgroup is read from its processes: all of it, and once."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paracle_sandbox.backends.native.process_usage import (
    MOST_DESCRIPTORS,
    ProcessLooks,
    read_processes,
)
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.outcome import Counts, memory_alarm, memory_breach

MIB = 1 << 20
# Each holds 64 MiB; the fork has it too.
HOLDERS = {
    "its own": "held = bytearray(b'x') * SIZE",
    "shared": "held = mmap.mmap(-1, SIZE); held.write(b'x' * SIZE)",
    "in a file": "os.write(os.memfd_create('held'), b'x' * SIZE)",
    "in a mapped file": (
        "fd = os.memfd_create('held'); os.write(fd, b'x' * SIZE); held = mmap.mmap(fd, SIZE);"
        "held[::4096] = b'y' * (SIZE // 4096)"
    ),
    "nothing": "pass",
}


@contextlib.contextmanager
def holding(holder: str, forks: int = 1) -> Iterator[int]:
    """Start a process that runs ``holder`` and then has children. They all hold what it made.

    Returns its pid.
    """
    told = r"os.write(1, b'1\n'); os.read(0, 1)"
    fork = f"for _ in range({forks}):\n    if not os.fork():\n        break\n"
    code = f"import mmap, os\nSIZE = 64 << 20\n{holder}\n{fork}{told}\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        for _ in range(forks + 1):
            assert process.stdout.readline() == b"1\n"
        yield process.pid
        process.communicate(b"\n" * (forks + 1))


@pytest.mark.parametrize("kind", HOLDERS)
def test_memory_is_counted_once_wherever_it_is(kind: str) -> None:
    with holding(HOLDERS[kind]) as pid:
        used = read_processes(pid).memory_bytes
    expected = 0 if kind == "nothing" else 64 * MIB
    assert expected * 0.95 < used < expected + 24 * MIB


MANY = (
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024));"
    "held = [os.dup(0) for _ in range(1000)]"
)


async def test_a_sandbox_that_cannot_be_looked_through_is_above_its_limit() -> None:
    """Each descriptor may be memory, and reading all of them every half second would take all the
    time."""
    forks = MOST_DESCRIPTORS // 1000
    with holding(MANY, forks) as pid:
        usage = await ProcessLooks().usage(pid, network_mode="none")
    assert usage.processes == forks + 1
    assert "open files" in usage.incomplete
    for breach in (
        memory_breach(usage, Counts(), SandboxConfig()),
        memory_alarm(usage, SandboxConfig()),
    ):
        assert breach is not None and breach.resource_type == "pids"
        assert "memory limit cannot be kept" in breach.message


async def test_the_loop_goes_on_while_somebody_looks() -> None:
    """A caller that asks meanwhile shares the next look."""
    with holding(MANY) as pid:
        looks, turns = ProcessLooks(), 0
        asked = [asyncio.ensure_future(looks.usage(pid, network_mode="bridge")) for _ in range(20)]
        while not all(one.done() for one in asked):
            await asyncio.sleep(0)
            turns += 1
    assert turns > 20
    assert len({id(one.result()) for one in asked}) <= 2
    assert not asked[0].result().incomplete
    with pytest.raises(FileNotFoundError):
        await looks.usage(pid, network_mode="none")
