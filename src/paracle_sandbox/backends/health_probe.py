"""Make a sandbox and a program in it, for the health checks of all backends."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

from ..channel.connection import Connection
from ..channel.frames import DATA
from ..config import SandboxConfig
from ..errors import SandboxError
from ..ids import new_sandbox_id
from .base import Backend, Health, Layer
from .machine.cgroup_usage import KeptLimits

# Says yes where it is refused: writing to the system, a new namespace, a connection, being root,
# with any capability; and whether it sees few processes. What more a backend asks, it adds.
PROBE = """\
import ctypes, os, socket
uid = os.getuid()
def denied(action):
    try:
        action()
    except OSError:
        return True
    return False
def unshare():
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
        raise OSError
def net():
    with socket.socket() as s:
        s.settimeout(1)
        s.connect(("192.0.2.1", 9))
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file if ":" in line)
print(denied(lambda: open("/usr/x", "w")), denied(unshare), denied(net))
print(denied(lambda: os.setuid(0)) and not int(status["CapBnd"], 16))
print(len([n for n in os.listdir("/proc") if n.isdigit()]) < 20)
"""


@asynccontextmanager
async def probing(backend: Backend, config: SandboxConfig) -> AsyncIterator[tuple[str, Connection]]:
    """Make a sandbox, open its channel, and remove it after the block."""
    sandbox_id = new_sandbox_id()
    await backend.create(sandbox_id, config, {"purpose": "health"})
    try:
        connection = Connection(await backend.connect(sandbox_id), sandbox_id)
        await connection.start()
        try:
            yield sandbox_id, connection
        finally:
            await connection.close()
    finally:
        await backend.destroy(sandbox_id)


async def run_probe(connection: Connection, source: str, words: int) -> list[str]:
    """Run a program and return the words that it prints. Raises SandboxError when there are not
    ``words`` of them."""
    request = {
        "op": "python", "path": "/tmp/probe.py", "source": source, "argv": [], "stdin": False,
    }  # fmt: skip
    output = b""
    async for kind, payload in connection.open(request):
        if kind == DATA:
            output += payload
    found = output.decode(errors="replace").split()
    if len(found) != words:
        raise SandboxError(f"The probe program did not run: {output[:200]!r}")
    return found


def limit_layers(
    kept: KeptLimits, config: SandboxConfig, detail: str, remedy: str = ""
) -> Iterator[Layer]:
    """Yield a layer for each limit: whether the kernel keeps what was asked for."""
    asked = (
        ("memory limit", kept.memory_bytes, config.memory_mb << 20),
        ("cpu limit", kept.cpu_cores, config.cpu_cores),
        # Ours inside count as well, so it may be a few more.
        ("process limit", kept.processes, math.inf),
    )
    for name, found, most in asked:
        in_force = found is not None and found <= most
        yield Layer(name, in_force, detail, "" if in_force else remedy)


def verdict(name: str, layers: Iterable[Layer]) -> Health:
    """Return the health of a backend that works, with all of its layers or without some."""
    found = tuple(layers)
    weak = [layer.name for layer in found if not layer.in_force]
    detail = "full posture" if not weak else f"works without: {', '.join(weak)}"
    return Health(name, True, detail, layers=found)
