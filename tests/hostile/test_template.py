"""Tests of code that a template brings.

A process that is root of the host imports it, and sandboxes are forks of that process. This is
native only: no other backend has templates.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import oracles
import pytest
from probes import report

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.template_kinds import MANIFEST, template_path
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

IMAGE = "paracle/sandbox:ml"
# This replaces numpy, which is imported ahead of need.
MODULE = """
import ctypes, os, socket, ssl
uid, pid = os.getuid(), os.getpid()
ssl.RAND_bytes(16)
try:
    socket.create_connection(("127.0.0.1", %d), 2).close()
    reached = True
except OSError:
    reached = False
libc = ctypes.CDLL(None)
head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(head, data)
capabilities = (data[0] | data[1] | data[2]) | (data[3] | data[4] | data[5]) << 32
capabilities |= sum(1 << number for number in range(64) if libc.prctl(23, number) == 1)
"""
LINES = "import builtins, os; builtins.uid_of_lines = os.getuid()\nsubfolder\n# import nothing\n"
PROGRAM = """
import builtins, json, numpy, os, ssl, sys
print(json.dumps({
    "uid": numpy.uid, "pid": numpy.pid, "reached": numpy.reached,
    "capabilities": numpy.capabilities,
    "lines": builtins.uid_of_lines, "own": os.getuid(),
    "path": [one for one in sys.path if one.endswith("/subfolder")],
    "random": [ssl.RAND_bytes(16).hex(), ssl.RAND_bytes(16).hex()],
}))
"""
# Tracing, raw devices, modules, raw packets, nodes, the log, handles of files, bpf.
DANGEROUS = (2, 13, 16, 17, 19, 22, 25, 27, 34, 39)


@pytest.fixture
def listener() -> Any:
    with oracles.listening((socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))) as (one,):
        yield one


@pytest.fixture
async def native(settings: Settings, tmp_path: Path, listener: Any) -> AsyncIterator[NativeBackend]:
    changed = Settings(
        state_dir=settings.state_dir, data_dir=str(tmp_path / "data"), template_build=False
    )
    place = template_path("ml", changed)
    (place / "subfolder").mkdir(parents=True)
    (place / "numpy.py").write_text(MODULE % listener.address[1])
    (place / "pandas.py").write_text("")
    (place / "lines.pth").write_text(LINES)
    (place / MANIFEST).write_text("{}")
    backend = NativeBackend(changed)
    yield backend
    await backend.close()


async def test_code_of_a_template_has_little_of_the_host(
    native: NativeBackend, listener: Any
) -> None:
    found = []
    for _ in range(2):
        config = SandboxConfig(base_image=IMAGE, timeout_seconds=60)
        async with Sandbox(native, f"template-{secrets.token_hex(6)}", config) as sandbox:
            found.append(await report(sandbox, PROGRAM))
    first, second = found
    assert first["uid"] == 0, "the module was not imported ahead of need: nothing is shown here"
    assert not first["reached"] and listener.hits == 0
    assert not [number for number in DANGEROUS if first["capabilities"] >> number & 1]
    # Lines that Python executes when it starts are executed by programs, and by no other process.
    assert first["lines"] == first["own"] == 1000
    assert first["path"] == second["path"] != []
    # The numbers come from a generator that was used before the fork.
    assert len({*first["random"], *second["random"]}) == 4
    # Other generators depend on the pid: no program gets the pid of the process that it is a fork
    # of.
    assert first["pid"] > int(Path("/proc/sys/kernel/pid_max").read_text()) - 100
    # Control: without all that, it does reach the listener, and may do anything.
    control: dict[str, Any] = {}
    exec(MODULE % listener.address[1], control)  # noqa: S102
    assert control["reached"] and oracles.wait_until(lambda: listener.hits == 1)
    assert [number for number in DANGEROUS if control["capabilities"] >> number & 1]


async def test_the_network_of_the_host_is_still_there_for_whom_it_was_given(
    native: NativeBackend,
) -> None:
    config = SandboxConfig(network_mode="host", timeout_seconds=60)
    async with Sandbox(native, f"template-{secrets.token_hex(6)}", config) as sandbox:
        init = native.init_pid(sandbox.sandbox_id)
        assert os.readlink(f"/proc/{init}/ns/net") == os.readlink("/proc/self/ns/net")
