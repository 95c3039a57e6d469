"""Whether native sandboxes work here: make one, run a program in it, read what the kernel says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ...channel.connection import Connection
from ...channel.frames import DATA
from ...config import SandboxConfig
from ...errors import SandboxError
from ..base import Health, Layer, Usage
from ..posture import NAMESPACES, Posture, read_posture

if TYPE_CHECKING:
    from .backend import NativeBackend

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
print(denied(lambda: open("/usr/x", "w")), denied(unshare), denied(net))
print(denied(lambda: os.setuid(0)))
"""


async def examine(probe: NativeBackend) -> Health:
    """Uses the backend up. Never raises: what goes wrong is the answer."""
    try:
        layers = tuple([layer async for layer in _measure(probe)])
    except (SandboxError, OSError) as error:
        return Health("native", False, str(error), getattr(error, "remedy", ""))
    finally:
        await probe.close()
    weak = [layer.name for layer in layers if not layer.in_force]
    detail = "full posture" if not weak else f"works without: {', '.join(weak)}"
    return Health("native", True, detail, layers=layers)


async def _measure(backend: NativeBackend) -> AsyncIterator[Layer]:
    from ...ids import new_sandbox_id

    sandbox_id = new_sandbox_id()
    config = SandboxConfig(memory_mb=128, cpu_cores=0.5)
    await backend.create(sandbox_id, config, {"purpose": "health"})
    try:
        connection = Connection(await backend.connect(sandbox_id), sandbox_id)
        await connection.start()
        try:
            # All of it while the channel is open: a guest whose channel ends goes.
            answer = await _run_probe(connection)
            posture = read_posture(backend.init_pid(sandbox_id))
            usage = await backend.usage(sandbox_id)
        finally:
            await connection.close()
        spawner = await backend.spawner(backend.templates.get("default"))
        limits = _limits(spawner.posture, usage)
        for layer in (*_isolation(posture, answer), *limits, _landlock(), _bridge()):
            yield layer
    finally:
        await backend.destroy(sandbox_id)


async def _run_probe(connection: Connection) -> list[bool]:
    request = {
        "op": "python",
        "path": "/tmp/probe.py",
        "source": _PROBE,
        "argv": [],
        "stdin": False,
    }
    output = b""
    stream = connection.open(request)
    async for kind, payload in stream:
        if kind == DATA:
            output += payload
    words = output.split()
    if len(words) != 4:
        raise SandboxError(f"The probe program did not run: {output[:200]!r}")
    return [word == b"True" for word in words]


def _isolation(posture: Posture, denied: list[bool]) -> Iterator[Layer]:
    for name in NAMESPACES:
        yield Layer(f"{name} namespace", name in posture.own_namespaces)
    yield Layer("own user", 0 not in posture.uids, f"host uid {posture.uids[0]}")
    yield Layer("no capabilities", not posture.has_capabilities and denied[3])
    yield Layer("no_new_privs", posture.no_new_privs == 1)
    yield Layer("seccomp", posture.seccomp == 2 and denied[1])
    yield Layer("read-only system", denied[0])
    yield Layer("no network", denied[2])


def _limits(posture: dict[str, Any], usage: Usage) -> Iterator[Layer]:
    version = posture["cgroup_version"]
    measured = bool(version) and usage.processes > 0
    remedy = "Run as root, or with a delegated cgroup: systemd-run --user --scope -p Delegate=yes"
    detail = f"cgroup v{version}" if version else str(posture["cgroup_note"])
    for name in ("memory limit", "cpu limit"):
        yield Layer(name, measured, detail, "" if measured else remedy)
    yield Layer("process limit", True, detail if version else "RLIMIT_NPROC")
    disk = "btrfs quota" if posture["volume"] else str(posture["volume_note"])
    yield Layer(
        "disk limit apart from memory",
        bool(posture["volume"]),
        disk,
        "" if posture["volume"] else "Run as root on a kernel with btrfs and loop devices.",
    )


def _landlock() -> Layer:
    try:
        with open("/sys/kernel/security/lsm", encoding="ascii") as file:
            there = "landlock" in file.read()
    except OSError:
        there = _landlock_answers()
    remedy = "" if there else "Boot a kernel from 5.19 on with lsm=landlock."
    return Layer("landlock", there, "", remedy)


def _landlock_answers() -> bool:
    import ctypes

    create_ruleset, version_flag = 444, 1
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes = (ctypes.c_long,) + (ctypes.c_ulong,) * 3
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(create_ruleset, 0, 0, version_flag)) >= 2


def _bridge() -> Layer:
    from . import network

    missing = network.missing()
    remedy = f"network_mode=bridge needs {', '.join(missing)}." if missing else ""
    return Layer("bridge network available", not missing, "", remedy)
