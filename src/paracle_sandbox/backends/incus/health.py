"""Whether instances work here: make one, run a program in it, read what server and kernel say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from ...config import SandboxConfig
from ...errors import SandboxError
from ..base import Health, Layer, Usage
from ..probe import PROBE, probing, run_probe, verdict
from .server import Refused

if TYPE_CHECKING:
    from .backend import IncusBackend

_PROBE = (
    PROBE
    + """\
with open("/proc/self/uid_map") as file:
    host = int(file.read().split()[1])
print(os.getuid(), status["NoNewPrivs"].strip(), host, os.path.exists("/dev/incus"))
"""
)
_WORDS = 9


async def examine(probe: IncusBackend) -> Health:
    """Uses the backend up. Never raises: what goes wrong is the answer."""
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
        usage = await backend.usage(sandbox_id)
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
