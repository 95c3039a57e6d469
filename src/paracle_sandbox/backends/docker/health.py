"""Whether containers work here: make one, run a program in it, read what engine and kernel say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ...config import SandboxConfig
from ...errors import SandboxError
from ..base import Health, Layer, Usage
from ..health_probe import PROBE, limit_layers, probing, run_probe, verdict
from ..machine.cgroup_usage import read_limits
from ..machine.nftables import NFT_MISSING, find_nft
from ..machine.process_isolation import NAMESPACES, read_posture

if TYPE_CHECKING:
    from .backend import DockerBackend

_PROBE = PROBE + "print(uid)\n"
_WORDS = 6
_FILTER = 2  # the mode in /proc/PID/status


async def examine(probe: DockerBackend) -> Health:
    """Measure the layers, and close the backend. Never raises: an error becomes the answer."""
    try:
        return verdict(probe.name, [layer async for layer in _measure(probe)])
    except (SandboxError, OSError) as error:
        return Health(probe.name, False, str(error))
    finally:
        await probe.close()


async def _measure(backend: DockerBackend) -> AsyncIterator[Layer]:
    image = backend.settings.default_config(backend.name).base_image
    config = SandboxConfig(memory_mb=128, cpu_cores=0.5, base_image=image)
    async with probing(backend, config) as (sandbox_id, connection):
        words = await run_probe(connection, _PROBE, _WORDS)
        usage = await backend.usage(sandbox_id)
        pid, groups = backend.init_pid(sandbox_id), backend.cgroups(sandbox_id)
        limits = _limits(usage, groups, config)
        isolation = _isolation(words, pid, backend.has_own_kernel)
        for layer in (*isolation, *limits, _disk(backend), *_around(backend)):
            yield layer


def _isolation(words: list[str], pid: int, has_own_kernel: bool) -> Iterator[Layer]:
    yes = [word == "True" for word in words]
    own: frozenset[str] = frozenset()
    filtered = yes[1]
    # Of another machine, or not ours to look at, there is only what was seen inside.
    with suppress(OSError, KeyError):
        posture = read_posture(pid)
        own = posture.own_namespaces
        if has_own_kernel:  # what is behind the calls of a program is not this machine's kernel
            filtered = posture.seccomp == _FILTER
    yield Layer("pid namespace", yes[4])
    for name in sorted(own - {"pid"} if own else ()):
        yield Layer(f"{name} namespace", name in NAMESPACES)
    yield Layer("own user", words[5] != "0", f"uid {words[5]}")
    yield Layer("no capabilities", yes[3])
    yield Layer("seccomp", filtered, "of gVisor's own process" if has_own_kernel else "")
    yield Layer("read-only system", yes[0])
    yield Layer("no network", yes[2])


def _limits(usage: Usage, groups: dict[str, str], config: SandboxConfig) -> Iterator[Layer]:
    if groups:
        yield from limit_layers(read_limits(groups), config, "the container's cgroup")
        return
    # Of an engine elsewhere there is only its word, and that it counts what was asked for.
    for name in ("memory limit", "cpu limit", "process limit"):
        yield Layer(name, usage.processes > 0, "as the engine says")


def _disk(backend: DockerBackend) -> Layer:
    memory = backend.store.why_in_memory
    return Layer(
        "disk limit apart from memory",
        not memory,
        memory or "btrfs quota",
        "Run as root on the engine's machine, on a kernel with btrfs." if memory else "",
    )


def _around(backend: DockerBackend) -> Iterator[Layer]:
    lacks = [] if backend.engine.endpoint.shares_our_files else ["root on the engine's machine"]
    lacks += [] if find_nft() else [NFT_MISSING]
    remedy = (
        f"network_mode=bridge needs {', '.join(lacks)}, or --allow-degraded firewall."
        if lacks
        else ""
    )
    yield Layer("bridge network available", not lacks, "", remedy)
