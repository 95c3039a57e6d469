"""Whether instances work here: make one, run a program in it, read what server and kernel say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from ...config import SandboxConfig
from ...errors import SandboxError
from ..base import Health, Layer
from ..health_probe import PROBE, probing, run_probe, verdict
from .labels import instance_name
from .server import Refused
from .spec import MACHINE

if TYPE_CHECKING:
    from .backend import IncusBackend

_PROBE = (
    PROBE
    + """\
with open("/proc/self/uid_map") as file:
    host = int(file.read().split()[1])
print(uid, status["NoNewPrivs"].strip(), host, os.path.exists("/dev/incus"))
"""
)
_WORDS = 9


async def examine(probe: IncusBackend) -> Health:
    """Measure the layers, and close the backend. Never raises: an error becomes the answer."""
    try:
        return verdict(probe.name, [layer async for layer in _measure(probe)])
    except (SandboxError, OSError) as error:
        return Health(probe.name, False, str(error))
    except Refused as refused:
        return Health(probe.name, False, f"The Incus server refused: {refused.message}")
    finally:
        await probe.close()


async def _measure(backend: IncusBackend) -> AsyncIterator[Layer]:
    image = backend.settings.default_config(backend.name).base_image
    config = SandboxConfig(memory_mb=256, cpu_cores=0.5, base_image=image)
    async with probing(backend, config) as (sandbox_id, connection):
        words = await run_probe(connection, _PROBE, _WORDS)
        instance = await backend.instances.find(instance_name(sandbox_id)) or {}
        kept = dict(instance.get("expanded_config") or {})
        is_machine = backend.kind == MACHINE
        for layer in (*_isolation(words, is_machine), *_limits(kept, is_machine)):
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


def _isolation(words: list[str], is_machine: bool) -> Iterator[Layer]:
    yes = [word == "True" for word in words]
    yield Layer("pid namespace", yes[4])
    if is_machine:
        yield Layer("kernel of its own", True, "a virtual machine")
    else:
        yield Layer("user namespace", words[7] != "0", f"root inside is uid {words[7]} of the host")
    yield Layer("own user", words[5] != "0", f"uid {words[5]}")
    yield Layer("no capabilities", yes[3])
    yield Layer("no_new_privs", words[6] == "1")
    yield Layer("seccomp", yes[1])
    yield Layer("read-only system", yes[0])
    yield Layer("no network", yes[2])
    yield Layer("no guest API", words[8] == "False")


def _limits(kept: dict[str, str], is_machine: bool) -> Iterator[Layer]:
    """Yield the limits as the server keeps them: in the instance's cgroup, or by the size of the
    machine."""
    keys = {"memory limit": ("limits.memory",), "cpu limit": ("limits.cpu.allowance", "limits.cpu")}
    if not is_machine:
        keys["process limit"] = ("limits.processes",)
    for name, possible in keys.items():
        found = next((kept[key] for key in possible if kept.get(key)), "")
        yield Layer(name, bool(found), found)
