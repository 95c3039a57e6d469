"""What a sandbox without a cgroup uses is read from its processes: all of it, and once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paracle_sandbox.backends.cgroup_usage import read_usage

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
def holding(holder: str) -> Iterator[int]:
    """The number of a process that holds it, as does a child of it."""
    told = r"os.write(1, b'1\n'); os.read(0, 1)"
    code = f"import mmap, os\nSIZE = 64 << 20\n{holder}\nos.fork()\n{told}\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:  # type: ignore[call-overload]
        for _ in range(2):
            assert process.stdout.readline() == b"1\n"
        yield process.pid
        process.communicate(b"\n\n")


@pytest.mark.parametrize("kind", HOLDERS)
def test_memory_is_counted_once_wherever_it_is(kind: str) -> None:
    with holding(HOLDERS[kind]) as pid:
        used = read_usage({}, pid, networked=False).memory_bytes
    expected = 0 if kind == "nothing" else 64 * MIB
    assert expected * 0.95 < used < expected + 24 * MIB
