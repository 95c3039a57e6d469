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
import fcntl
import hashlib
import os
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

from ...config import SandboxConfig
from ...errors import BackendUnavailableError, SandboxCreationError
from ..nft import AZURE, DENIED, NFT_MISSING, find_nft, run_nft
from .engine import Engine, EngineRefused

NETWORK = "paracle-sandbox"
TABLE = "paracle_sandbox_docker"
PREFIX = "prcl"
_LOCK = "/run/paracle-sandbox-docker-network.lock"
_LOCK_SECONDS = 30.0
_LOCK_PAUSE_SECONDS = 0.005
_MAX_CONNECTIONS = 4096
_SIOCSIFFLAGS, _SIOCBRDELBR = 0x8914, 0x89A1

_RULES = """\
table inet {table}
delete table inet {table}
table inet {table} {{
    set denied {{
        type ipv4_addr
        flags interval
        elements = {{ {denied} }}
    }}
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
        ip daddr @denied drop
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
        ip daddr @denied drop
        ct state new add @connections {{ ip saddr ct count over {connections} }} drop
    }}
}}
"""


def rules() -> str:
    """The whole table, as one transaction that gives the same result from any state before."""
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
    async with _lock(fcntl.LOCK_SH):
        await _have_network(engine)
        if guarded:
            await asyncio.to_thread(run_nft, rules())
        yield NETWORK


async def isolate(config: SandboxConfig) -> None:
    """Keep the ports of the bridge apart, those that came since included. Raises
    SandboxCreationError when that cannot be, and nobody allowed it."""
    try:
        await asyncio.to_thread(_isolate_ports)
    except OSError as error:
        if "firewall" not in config.allow_degraded:
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
        async with _lock(fcntl.LOCK_EX, wait=False):
            await engine.remove_network(NETWORK)
            # Podman forgets the network, but leaves its bridge.
            await asyncio.to_thread(_remove_bridge, await _interface(engine))
    with contextlib.suppress(SandboxCreationError):
        async with _lock(fcntl.LOCK_EX, wait=False):
            await asyncio.to_thread(_remove_rules)


def _require_rules(engine: Engine, config: SandboxConfig) -> bool:
    """Whether rules can be had; an error when they cannot and nobody allowed that."""
    lacks = []
    if not engine.endpoint.shares_our_files:
        lacks.append("root on the machine of the engine")
    if find_nft() is None:
        lacks.append(NFT_MISSING)
    if lacks and "firewall" not in config.allow_degraded:
        raise BackendUnavailableError(
            f"network_mode=bridge needs {' and '.join(lacks)}, to keep sandboxes from the host "
            "and from each other. Use network_mode=none, or allow it by name: "
            'SandboxConfig(allow_degraded={"firewall"}).',
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
    if os.geteuid() != 0 or not Path(f"/sys/class/net/{name}/bridge").exists():
        return
    down = struct.pack("16sh14x", name.encode(), 0)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, down)
        fcntl.ioctl(control, _SIOCBRDELBR, name.encode().ljust(16, b"\0"))


def _remove_rules() -> None:
    used = any(name.startswith(PREFIX) for _, name in socket.if_nameindex())
    if not used and os.geteuid() == 0 and find_nft() is not None:
        run_nft(f"table inet {TABLE}\ndelete table inet {TABLE}\n")


@contextlib.asynccontextmanager
async def _lock(kind: int, *, wait: bool = True) -> AsyncIterator[None]:
    """Between the processes of this machine; without root there is nothing to keep apart."""
    if os.geteuid() != 0:
        yield
        return
    file = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + (_LOCK_SECONDS if wait else 0)
    try:
        while not _locked(file, kind):
            if time.monotonic() >= deadline:
                raise SandboxCreationError("The network is in use", step="network lock")
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(file)


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
