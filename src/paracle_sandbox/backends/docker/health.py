"""Whether containers work here: make one, run a program in it, read what engine and kernel say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from ...channel.connection import Connection
from ...channel.frames import DATA
from ...config import SandboxConfig
from ...errors import SandboxError
from ...ids import new_sandbox_id
from ..base import Health, Layer, Usage
from ..nft import NFT_MISSING, find_nft
from ..posture import NAMESPACES, read_posture

if TYPE_CHECKING:
    from .backend import DockerBackend

_PROBE = """\
import ctypes, os, socket
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
print(os.getpid() < 1000 and len([n for n in os.listdir("/proc") if n.isdigit()]) < 20)
print(os.getuid())
"""


async def examine(probe: DockerBackend) -> Health:
    """Uses the backend up. Never raises: what goes wrong is the answer."""
    try:
        layers = tuple([layer async for layer in _measure(probe)])
    except (SandboxError, OSError) as error:
        return Health(probe.name, False, str(error))
    finally:
        await probe.close()
    weak = [layer.name for layer in layers if not layer.in_force]
    detail = "full posture" if not weak else f"works without: {', '.join(weak)}"
    return Health(probe.name, True, detail, layers=layers)


async def _measure(backend: DockerBackend) -> AsyncIterator[Layer]:
    sandbox_id = new_sandbox_id()
    config = backend.settings.default_config(backend.name)
    config = SandboxConfig(memory_mb=128, cpu_cores=0.5, base_image=config.base_image)
    await backend.create(sandbox_id, config, {"purpose": "health"})
    try:
        connection = Connection(await backend.connect(sandbox_id), sandbox_id)
        await connection.start()
        try:
            words = await _run_probe(connection)
            usage = await backend.usage(sandbox_id)
            pid = backend.init_pid(sandbox_id)
        finally:
            await connection.close()
        for layer in (*_isolation(words, pid), *_limits(backend, usage), *_around(backend)):
            yield layer
    finally:
        await backend.destroy(sandbox_id)


async def _run_probe(connection: Connection) -> list[str]:
    request = {
        "op": "python", "path": "/tmp/probe.py", "source": _PROBE, "argv": [], "stdin": False,
    }  # fmt: skip
    output = b""
    async for kind, payload in connection.open(request):
        if kind == DATA:
            output += payload
    words = output.decode(errors="replace").split()
    if len(words) != 6:
        raise SandboxError(f"The probe program did not run: {output[:200]!r}")
    return words


def _isolation(words: list[str], pid: int) -> Iterator[Layer]:
    yes = [word == "True" for word in words]
    try:
        own = read_posture(pid).own_namespaces
    except (OSError, KeyError):
        own = frozenset()  # of another machine, or not ours to look at
    yield Layer("pid namespace", yes[4])
    for name in sorted(own - {"pid"} if own else ()):
        yield Layer(f"{name} namespace", name in NAMESPACES)
    yield Layer("own user", words[5] != "0", f"uid {words[5]}")
    yield Layer("no capabilities", yes[3])
    yield Layer("seccomp", yes[1])
    yield Layer("read-only system", yes[0])
    yield Layer("no network", yes[2])


def _limits(backend: DockerBackend, usage: Usage) -> Iterator[Layer]:
    measured = usage.processes > 0
    for name in ("memory limit", "cpu limit"):
        yield Layer(name, measured, "the container's cgroup")
    yield Layer("process limit", measured)
    memory = backend.store.why_in_memory
    yield Layer(
        "disk limit apart from memory",
        not memory,
        memory or "btrfs quota",
        "Run as root on the engine's machine, on a kernel with btrfs." if memory else "",
    )


def _around(backend: DockerBackend) -> Iterator[Layer]:
    lacks = [] if backend.engine.endpoint.shares_our_files else ["root on the engine's machine"]
    lacks += [] if find_nft() else [NFT_MISSING]
    remedy = f"network_mode=bridge needs {', '.join(lacks)}." if lacks else ""
    yield Layer("bridge network available", not lacks, "", remedy)
