"""Whether native sandboxes work here: make one, run a program in it, read what the kernel says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ...config import SandboxConfig
from ...errors import SandboxError
from ..base import Health, Layer
from ..health_probe import PROBE, limit_layers, probing, run_probe, verdict
from ..machine.cgroup_usage import KeptLimits, read_limits
from ..machine.process_isolation import NAMESPACES, Posture, read_posture
from .obstacles import PAGE, container_kind, read_file

if TYPE_CHECKING:
    from .backend import NativeBackend
_WORDS = 5


async def examine(probe: NativeBackend) -> Health:
    """Uses the backend up. Never raises: what goes wrong is the answer."""
    try:
        layers = tuple([layer async for layer in _measure(probe)])
    except (SandboxError, OSError) as error:
        return Health("native", False, str(error), getattr(error, "remedy", ""))
    finally:
        await probe.close()
    return verdict("native", layers)


async def _measure(backend: NativeBackend) -> AsyncIterator[Layer]:
    config = SandboxConfig(memory_mb=128, cpu_cores=0.5)
    async with probing(backend, config) as (sandbox_id, connection):
        # All of it while the channel is open: a guest whose channel ends goes.
        answer = await run_probe(connection, PROBE, _WORDS)
        posture = read_posture(backend.init_pid(sandbox_id))
        groups = backend.cgroups(sandbox_id)
        kept = read_limits(groups) if groups else None
    spawner = await backend.spawner(backend.templates.get("default"))
    denied = [word == "True" for word in answer]
    limits = _limits(spawner.posture, kept, config)
    for layer in (*_isolation(posture, denied), *limits, _landlock(spawner.posture), _bridge()):
        yield layer


def _isolation(posture: Posture, denied: list[bool]) -> Iterator[Layer]:
    for name in NAMESPACES:
        yield Layer(f"{name} namespace", name in posture.own_namespaces)
    yield Layer("own user", 0 not in posture.uids, f"host uid {posture.uids[0]}")
    yield Layer("no capabilities", not posture.has_capabilities and denied[3])
    yield Layer("no_new_privs", posture.no_new_privs == 1)
    yield Layer("seccomp", posture.seccomp == 2 and denied[1])
    yield Layer("read-only system", denied[0])
    yield Layer("no network", denied[2])


def _limits(
    posture: dict[str, Any], kept: KeptLimits | None, config: SandboxConfig
) -> Iterator[Layer]:
    contained = container_kind(read_file)
    remedy = "Run as root, or with a delegated cgroup: systemd-run --user --scope -p Delegate=yes"
    if contained:
        remedy = (
            f"Limit the container as a whole ({contained} run --memory 2g --cpus 2), or run it as "
            f"root with the options of {PAGE}."
        )
    if kept is not None:
        yield from limit_layers(kept, config, f"cgroup v{posture['cgroup_version']}", remedy)
    else:
        for name in ("memory limit", "cpu limit"):
            yield Layer(name, False, str(posture["cgroup_note"]), remedy)
        yield Layer("process limit", True, "RLIMIT_NPROC")
    disk = "btrfs quota" if posture["volume"] else str(posture["volume_note"])
    yield Layer(
        "disk limit apart from memory",
        bool(posture["volume"]),
        disk,
        "" if posture["volume"] else _disk_remedy(contained),
    )


def _disk_remedy(contained: str) -> str:
    if contained:
        return (
            "As root, and with the loop devices in the container: --device /dev/loop-control "
            "--device-cgroup-rule 'b 7:* rmw'"
        )
    return "Run as root on a kernel with btrfs and loop devices."


def _landlock(posture: dict[str, Any]) -> Layer:
    """Report what the spawner found: nothing outside shows it. A sandbox that could not be
    put under it would not have started."""
    remedy = "" if posture["landlock"] else "Boot a kernel from 5.19 on with lsm=landlock."
    return Layer("landlock", bool(posture["landlock"]), str(posture["landlock_note"]), remedy)


def _bridge() -> Layer:
    from . import network

    missing = network.missing()
    remedy = f"network_mode=bridge needs {', '.join(missing)}." if missing else ""
    return Layer("bridge network available", not missing, "", remedy)
