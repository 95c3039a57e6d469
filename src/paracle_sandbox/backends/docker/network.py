"""network_mode="bridge": a network of our own on the engine, and rules of our own before it.

    sandbox ─ eth0 ═ veth ─ prcl<engine> ─ from_sandbox ─┬─ nothing is for the host
                                                         └─ leaving ── the engine's NAT ── out

The engine makes the bridge, the addresses and the translation. It is told to keep containers
apart, but how well it does depends on a kernel module; and it lets every container speak to the
host. So the ports of the bridge are isolated from each other before anything runs in a sandbox,
and a table of our own drops what is for the host, for metadata services, or for other sandboxes.
It matches the bridge by the prefix of its name and is the same for one sandbox and for a thousand.

Both need root on the engine's machine. Elsewhere bridge is refused, unless the caller allows that
by name: SandboxConfig(allow_degraded={"firewall"}).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from ...config import SandboxConfig
from ...errors import BackendUnavailableError, SandboxCreationError
from ...host.platforms import lock_file, user_id
from ..machine.nftables import AZURE, DENIED, NFT_MISSING, find_nft, load_table, remove_table
from .engine import Engine, EngineRefused

NETWORK = "paracle-sandbox"
TABLE = "paracle_sandbox_docker"
PREFIX = "prcl"
# Why the engine's own means do not suffice, as test_network.py shows.
ENGINE_ALONE = (
    "The rules of the engine itself let every container reach the services of the engine's machine "
    "and the metadata address of a cloud, and on some kernels other containers of its network."
)
_LOCK = "/run/paracle-sandbox-docker-network.lock"
_LOCK_SECONDS = 30.0
_LOCK_PAUSE_SECONDS = 0.005
_MAX_CONNECTIONS = 4096
_SIOCSIFFLAGS, _SIOCBRDELBR = 0x8914, 0x89A1

_RULES = """\
table inet {table} {{
    set connections {{
        type ipv4_addr
        flags dynamic
        size 65535
    }}
    chain entering {{
        type filter hook prerouting priority raw; policy accept;
        iifname "{bridges}" jump from_sandbox
    }}
    chain from_sandbox {{
        meta nfproto != ipv4 drop
        fib saddr . iif oif missing drop
        fib daddr type != unicast drop
        ip daddr {{ {denied} }} drop
        ip daddr {azure} th dport != 53 drop
    }}
    chain receiving {{
        type filter hook input priority filter; policy accept;
        iifname "{bridges}" drop
    }}
    chain sending {{
        type filter hook output priority filter; policy accept;
        oifname "{bridges}" ct state != {{ established, related }} drop
    }}
    chain passing {{
        type filter hook forward priority filter - 1; policy accept;
        iifname "{bridges}" jump leaving
        oifname "{bridges}" ct state != {{ established, related }} drop
    }}
    chain leaving {{
        oifname "{bridges}" drop
        ct state invalid drop
        ip daddr {{ {denied} }} drop
        ct state new add @connections {{ ip saddr ct count over {connections} }} drop
    }}
}}
"""


def rules() -> str:
    """The whole table."""
    return _RULES.format(
        table=TABLE,
        bridges=f"{PREFIX}*",
        denied=", ".join(DENIED),
        azure=AZURE,
        connections=_MAX_CONNECTIONS,
    )


@contextlib.asynccontextmanager
async def bridge(engine: Engine, config: SandboxConfig) -> AsyncIterator[str]:
    """The name of the network, which nobody removes inside the block."""
    guarded = await asyncio.to_thread(_require_rules, engine, config)
    async with _lock(shared=True):
        await _have_network(engine)
        if guarded:
            await asyncio.to_thread(load_table, TABLE, rules())
        yield NETWORK


async def isolate(engine: Engine, config: SandboxConfig) -> None:
    """Keep the ports of the bridge apart, those that came since included. Raises
    SandboxCreationError when that cannot be, and nobody allowed it."""
    try:
        await asyncio.to_thread(_isolate_ports)
    except OSError as error:
        if not engine.settings.waives("firewall", config):
            raise SandboxCreationError(
                f"The sandbox cannot be kept from others of its network: {error}",
                step="network isolation",
            ) from error


def _isolate_ports() -> None:
    ports = [port for bridge in Path("/sys/class/net").glob(f"{PREFIX}*/brif")
             for port in bridge.iterdir()]  # fmt: skip
    if not ports:
        raise FileNotFoundError(2, "no port of its bridge is on this machine")
    for port in ports:
        # One that goes at this moment is apart from all.
        with contextlib.suppress(FileNotFoundError):
            (port / "isolated").write_text("1")


async def remove_unused(engine: Engine) -> None:
    """Network and rules, if no sandbox has a use for them. Quiet: the next one looks again."""
    with contextlib.suppress(SandboxCreationError, EngineRefused):
        async with _lock(wait=False):
            await engine.remove_network(NETWORK)
            # Podman forgets the network, but leaves its bridge.
            await asyncio.to_thread(_remove_bridge, await _interface(engine))
    with contextlib.suppress(SandboxCreationError):
        async with _lock(wait=False):
            await asyncio.to_thread(_remove_rules)


def _require_rules(engine: Engine, config: SandboxConfig) -> bool:
    """Whether rules can be had; an error when they cannot and nobody allowed that."""
    lacks = []
    if not engine.endpoint.shares_our_files:
        lacks.append("root on the machine of the engine")
    if sys.platform == "linux" and find_nft() is None:
        lacks.append(NFT_MISSING)
    if lacks and not engine.settings.waives("firewall", config):
        raise BackendUnavailableError(
            f"network_mode=bridge needs {' and '.join(lacks)}. {ENGINE_ALONE} Or use "
            "network_mode=none, or accept the engine's own rules by name: --allow-degraded "
            'firewall, in Python SandboxConfig(allow_degraded={"firewall"}).',
            step="network firewall",
        )
    return not lacks


async def _have_network(engine: Engine) -> None:
    if await engine.network(NETWORK) is not None:
        return
    interface = await _interface(engine)
    body = {
        "Name": NETWORK,
        "CheckDuplicate": True,
        "Driver": "bridge",
        "EnableIPv6": False,
        "Labels": {"paracle.managed": "true"},
        "Options": {
            "com.docker.network.bridge.name": interface,
            "com.docker.network.bridge.enable_icc": "false",
        },
    }
    try:
        await engine.create_network(body)
    except EngineRefused as refused:
        # Another process may have been faster.
        if await engine.network(NETWORK) is None:
            raise SandboxCreationError(
                f"The engine did not make a network: {refused.message}", step="network"
            ) from refused


async def _interface(engine: Engine) -> str:
    """The bridge of this engine; there may be several engines on a machine."""
    name = str((await engine.info()).get("ID") or engine.endpoint)
    return PREFIX + hashlib.sha256(name.encode()).hexdigest()[:8]


def _remove_bridge(name: str) -> None:
    if not _keeps_rules() or not Path(f"/sys/class/net/{name}/bridge").exists():
        return
    import fcntl

    down = struct.pack("16sh14x", name.encode(), 0)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, down)
        fcntl.ioctl(control, _SIOCBRDELBR, name.encode().ljust(16, b"\0"))


def _remove_rules() -> None:
    used = any(name.startswith(PREFIX) for _, name in socket.if_nameindex())
    if not used and _keeps_rules() and find_nft() is not None:
        remove_table(TABLE)


def _keeps_rules() -> bool:
    """Whether bridges and rules of this machine can be ours."""
    return sys.platform == "linux" and user_id() == 0


@contextlib.asynccontextmanager
async def _lock(*, shared: bool = False, wait: bool = True) -> AsyncIterator[None]:
    """Between the processes of this machine; where none keeps rules, there is nothing to keep
    apart."""
    if not _keeps_rules():
        yield
        return
    file = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + (_LOCK_SECONDS if wait else 0)
    try:
        while not _locked(file, shared):
            if time.monotonic() >= deadline:
                raise SandboxCreationError("The network is in use", step="network lock")
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(file)


def _locked(file: int, shared: bool) -> bool:
    try:
        lock_file(file, wait=False, shared=shared)
    except BlockingIOError:
        return False
    return True
