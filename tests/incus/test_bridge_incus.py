"""network_mode="bridge" on a real server, with a network that is made for the test and removed."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import socket
from collections.abc import AsyncIterator

import pytest
from incus_fixtures import Make

from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import instance_name
from paracle_sandbox.config import SandboxConfig

BRIDGE = SandboxConfig(network_mode="bridge")
TRY = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print("reached", place)
    except OSError as error:
        print("refused", place, error)
"""


@pytest.fixture
async def network(backend: IncusBackend) -> AsyncIterator[ipaddress.IPv4Interface]:
    name = f"pcl{secrets.token_hex(3)}"
    gateway = ipaddress.IPv4Interface(f"10.212.{os.getpid() % 250}.1/24")
    config = {"ipv4.address": str(gateway), "ipv4.nat": "true", "ipv6.address": "none"}
    body = {"name": name, "type": "bridge", "config": config}
    await backend.server.change("POST", "/1.0/networks", body)
    before = await backend.server.get(f"/1.0/networks/{name}")
    yield gateway
    after = await backend.server.get(f"/1.0/networks/{name}")
    assert {**after, "used_by": []} == {**before, "used_by": []}, "the network was changed"
    await backend.server.change("DELETE", f"/1.0/networks/{name}")


@pytest.mark.case("L02", "L03", "L07")
async def test_the_card_is_filtered(
    network: ipaddress.IPv4Interface, make: Make, backend: IncusBackend
) -> None:
    """It has an address and a way out, and reaches neither host nor neighbour nor metadata."""
    calls = 0

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.close()

    one, two = await make(BRIDGE), await make(BRIDGE)
    found = await backend.instances.find(instance_name(one.sandbox_id))
    assert found is not None and set(found["expanded_devices"]) <= {"root", "workspace", "eth0"}
    card = found["expanded_devices"]["eth0"]
    assert card["security.mac_filtering"] == card["security.ipv4_filtering"] == "true"
    routes = await one.run_command("cat /proc/net/route")
    assert any(line.split()[:2] == ["eth0", "00000000"] for line in routes.splitlines()), routes
    # Without a route, a datagram is refused at once.
    out = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('198.51.100.7', 9))"
    assert (await one.run_code(out))["exit_code"] == 0
    other = await backend.instances.find(instance_name(two.sandbox_id))
    assert other is not None
    peer = other["expanded_devices"]["eth0"]["ipv4.address"]
    server = await asyncio.start_server(answer, "0.0.0.0", 0)  # noqa: S104
    async with server:
        port = server.sockets[0].getsockname()[1]
        listen = (
            f"import socket; s = socket.create_server(('', {port})); print(flush=True); input()"
        )
        async with await two.start_code(listen, stdin=True) as command:
            await anext(command.output())
            places = [str(network.ip), peer, "169.254.169.254", _own_address()]
            result = await one.run_code(TRY, [f"{place}:{port}" for place in places], timeout=60)
    assert result["stdout"].count("refused") == 4 and "reached" not in result["stdout"], result
    assert calls == 0


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])
