"""network_mode: none is no card at all; bridge is one filtered card; host cannot be had.

The card is on a managed bridge that the server has already, which stays as it is. The server sees
to it that the card sends from its own address only, and that no other port of the bridge hears it.
The guest's own first steps, as root of the instance, give it the address and the routes, so the
image needs no program for that; and the routes refuse what a sandbox may not reach: the bridge's
subnet with the host and the other sandboxes, every other address of the host, and the addresses of
metadata services. Nobody inside has the capability to change a route.

Rules of the server's own (ACLs) would say the same from outside, but they take a kernel that can
track connections on bridges, and server 6.0.4 writes rules that nft refuses.
"""

from __future__ import annotations

import ipaddress
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...config import SandboxConfig
from ...errors import SandboxCreationError
from ..machine.nftables import AZURE, DENIED
from .errors import no_network
from .server import Refused, Server
from .spec import NIC, Nic

_HOST_BITS = 32
_TRIES = 200


async def nic_for(server: Server, config: SandboxConfig) -> Nic | None:
    """Return the card for a configuration. Raises SandboxCreationError when there is no such
    network here."""
    if config.network_mode == "none":
        return None
    if config.network_mode == "host":
        raise SandboxCreationError(
            'An Incus instance cannot share the network of its machine: use network_mode="bridge", '
            "or another backend.",
            step="network",
        )
    environment = (await server.get("/1.0")).get("environment") or {}
    network = await _choose_network(server)
    gateway = ipaddress.IPv4Interface(network["config"]["ipv4.address"])
    address = await _free_address(server, str(network["name"]), gateway)
    return Nic(
        device=card(str(network["name"]), address),
        address=address,
        netmask=str(gateway.netmask),
        gateway=str(gateway.ip),
        refused=tuple(refused_places(gateway.network, _addresses_of(environment))),
        resolv_conf=_name_servers(),
    )


def card(network: str, address: str) -> dict[str, str]:
    """Return the device. All IPv6 is dropped: the card has no such address."""
    return {
        "type": "nic",
        "network": network,
        "name": NIC,
        "ipv4.address": address,
        "security.mac_filtering": "true",
        "security.ipv4_filtering": "true",
        "security.ipv6_filtering": "true",
        "security.port_isolation": "true",
    }


def refused_places(subnet: ipaddress.IPv4Network, host: Iterable[str]) -> Iterator[str]:
    """Return what no sandbox may reach. The subnet is given by its halves, which outweigh the
    whole."""
    yield from DENIED
    yield AZURE
    yield from map(str, subnet.subnets() if subnet.prefixlen < _HOST_BITS else (subnet,))
    yield from sorted(host)


async def _choose_network(server: Server) -> dict[str, Any]:
    """Return the network of the default profile, else incusbr0, else any managed bridge with
    addresses."""
    networks = {
        str(one["name"]): one
        for one in await server.get("/1.0/networks?recursion=1")
        if one.get("managed") and one.get("type") == "bridge" and _has_ipv4(one)
    }
    if not networks:
        raise no_network()
    try:
        devices = (await server.get("/1.0/profiles/default")).get("devices") or {}
    except Refused:
        devices = {}
    named = [str(one.get("network")) for one in devices.values() if one.get("type") == "nic"]
    wanted = [name for name in (*named, "incusbr0", *sorted(networks)) if name in networks]
    return dict(networks[wanted[0]])


def _has_ipv4(network: Mapping[str, Any]) -> bool:
    return "/" in str((network.get("config") or {}).get("ipv4.address", ""))


async def _free_address(server: Server, network: str, gateway: ipaddress.IPv4Interface) -> str:
    """Return a free address of the subnet, at random: two callers at once hardly choose the same,
    and then the server refuses one."""
    leases = await server.get(f"/1.0/networks/{quote(network)}/leases")
    taken = {str(one.get("address")) for one in leases} | {str(gateway.ip)}
    first, last = int(gateway.network[1]), int(gateway.network[-2])
    for _ in range(_TRIES):
        address = str(ipaddress.IPv4Address(random.randint(first, last)))  # noqa: S311
        if address not in taken:
            return address
    raise SandboxCreationError(f"The network {network} has no free address.", step="network")


def _addresses_of(environment: Mapping[str, Any]) -> set[str]:
    """Return the addresses of the server's machine, as far as it tells, and of this one."""
    told = (str(one).rpartition(":")[0] for one in environment.get("addresses") or ())
    found = {one for one in told if _is_ipv4(one)}
    try:
        text = Path("/proc/net/fib_trie").read_text(encoding="ascii")
    except OSError:
        return found
    lines = [line.strip() for line in text.splitlines()]
    for line, after in itertools.pairwise(lines):
        if after.startswith("/32 host LOCAL") and line.startswith("|-- "):
            found.add(line.removeprefix("|-- "))
    return {one for one in found if not one.startswith("127.")}


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _name_servers() -> str:
    """Return the name servers of this machine, without its local stub, which cannot be reached."""
    for path in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        if "nameserver 127." not in text and "nameserver ::1" not in text:
            return text
    return "# no name server that a sandbox can reach\n"
