"""Whether instances work here: make one, run a program in it, read what server and kernel say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from ...channel.connection import Connection
from ...channel.frames import DATA
from ...config import SandboxConfig
from ...errors import SandboxError
from ...ids import new_sandbox_id
from ..base import Health, Layer, Usage
from .server import Refused

if TYPE_CHECKING:
    from .backend import IncusBackend

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
with open("/proc/self/uid_map") as file:
    host = int(file.read().split()[1])
print(denied(lambda: open("/usr/x", "w")), denied(unshare), denied(net))
print(denied(lambda: os.setuid(0)) and not int(status["CapBnd"], 16))
print(len([n for n in os.listdir("/proc") if n.isdigit()]) < 20)
print(os.getuid(), status["NoNewPrivs"].strip(), host, os.path.exists("/dev/incus"))
"""
_WORDS = 9


async def examine(probe: IncusBackend) -> Health:
    """Uses the backend up. Never raises: what goes wrong is the answer."""
    try:
        layers = tuple([layer async for layer in _measure(probe)])
    except (SandboxError, OSError) as error:
        return Health(probe.name, False, str(error))
    except Refused as refused:
        return Health(probe.name, False, f"The Incus server refused: {refused.message}")
    finally:
        await probe.close()
    weak = [layer.name for layer in layers if not layer.in_force]
    detail = "full posture" if not weak else f"works without: {', '.join(weak)}"
    return Health(probe.name, True, detail, layers=layers)


async def _measure(backend: IncusBackend) -> AsyncIterator[Layer]:
    sandbox_id = new_sandbox_id()
    image = backend.settings.default_config(backend.name).base_image
    config = SandboxConfig(memory_mb=256, cpu_cores=0.5, base_image=image)
    await backend.create(sandbox_id, config, {"purpose": "health"})
    try:
        connection = Connection(await backend.connect(sandbox_id), sandbox_id)
        await connection.start()
        try:
            words = await _run_probe(connection)
            usage = await backend.usage(sandbox_id)
        finally:
            await connection.close()
        for layer in (*_isolation(words), *_limits(usage)):
            yield layer
        memory = await backend.homes.why_in_memory()
        yield Layer(
            "disk limit apart from memory",
            not memory,
            memory or ("quota of the pool" if backend.homes.has_quotas else "btrfs quota"),
            "Use a pool with quotas (btrfs, zfs, lvm), or run as root beside the server."
            if memory
            else "",
        )
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
    if len(words) != _WORDS:
        raise SandboxError(f"The probe program did not run: {output[:200]!r}")
    return words


def _isolation(words: list[str]) -> Iterator[Layer]:
    yes = [word == "True" for word in words]
    yield Layer("pid namespace", yes[4])
    yield Layer("user namespace", words[7] != "0", f"root inside is uid {words[7]} of the host")
    yield Layer("own user", words[5] != "0", f"uid {words[5]}")
    yield Layer("no capabilities", yes[3])
    yield Layer("no_new_privs", words[6] == "1")
    yield Layer("seccomp", yes[1])
    yield Layer("read-only system", yes[0])
    yield Layer("no network", yes[2])
    yield Layer("no guest API", words[8] == "False")


def _limits(usage: Usage) -> Iterator[Layer]:
    measured = usage.processes > 0
    for name in ("memory limit", "cpu limit", "process limit"):
        yield Layer(name, measured, "the instance's cgroup")
