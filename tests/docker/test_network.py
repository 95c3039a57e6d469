"""network_mode="bridge" on real packets: out, and nowhere else.

    sandbox eth0 ═ bridge   the engine's machine   pclt0 ═ pclt1  a namespace, the internet
                            198.18.77.1                           198.18.77.10, 169.254.169.254

The oracles are sockets outside of the sandbox: what they did not accept did not arrive.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import oracles
import pytest
from container_fixtures import Make

from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.engine import Engine
from paracle_sandbox.backends.docker.network import NETWORK, PREFIX, TABLE, bridge
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("nft") or not shutil.which("ip"),
    reason="bridge networks need root and nft, and these tests ip: apt install nftables iproute2",
)

NAMESPACE, HERE, SERVER, METADATA = "paracle-out", "198.18.77.1", "198.18.77.10", "169.254.169.254"
PORT = 7017
BRIDGE = SandboxConfig(network_mode="bridge")
ON_EACH = pytest.mark.parametrize("engine", ["docker", "gvisor", "podman"])
LISTEN = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("ready", flush=True)
    while True:
        connection, peer = server.accept()
        connection.send(peer[0].encode())
        connection.close()
"""
PROBE = """
import json, socket, sys
def attempt(address, port):
    try:
        with socket.create_connection((address, port), 2) as s:
            return s.recv(100).decode()
    except OSError:
        return None
print(json.dumps([attempt(*target) for target in json.loads(sys.argv[1])]))
"""

# From one port, which a program has without limits, to as many as it likes.
FLOOD = """
import socket, sys
address, first = sys.argv[1], int(sys.argv[2])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(first, first + 12000):
    try:
        udp.sendto(b"x", (address, port))
    except OSError:
        pass
syn = []
for port in range(first, first + 400):
    tcp = socket.socket()
    tcp.setblocking(False)
    tcp.connect_ex((address, port))
    syn.append(tcp)
print("sent")
"""
MOST = 4096
# What others of this machine may open meanwhile; one flood is three times the most.
OTHERS = 1024


def run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def internet() -> Iterator[None]:
    """A machine beyond ours, which answers on an ordinary address and on the metadata one."""
    with contextlib.suppress(subprocess.CalledProcessError):
        run(f"ip netns del {NAMESPACE}")
    run(f"ip netns add {NAMESPACE}")
    server = None
    try:
        run(f"ip link add paracletest0 type veth peer name pclt1 netns {NAMESPACE}")
        run(f"ip address add {HERE}/24 dev paracletest0")
        run("ip link set paracletest0 up")
        run(f"ip route add {METADATA}/32 dev paracletest0")
        inside = f"ip netns exec {NAMESPACE} "
        for address in (f"{SERVER}/24", f"{METADATA}/32"):
            run(f"{inside}ip address add {address} dev pclt1")
        run(f"{inside}ip link set pclt1 up")
        run(f"{inside}ip link set lo up")
        server = subprocess.Popen([*inside.split(), sys.executable, "-c", LISTEN],
                                  stdout=subprocess.PIPE)  # fmt: skip
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield
    finally:
        if server is not None and server.stdout is not None:
            server.kill()
            server.wait()
            server.stdout.close()
        run(f"ip netns del {NAMESPACE}")
        with contextlib.suppress(subprocess.CalledProcessError):
            run("ip link del paracletest0")


@pytest.fixture
async def swept(backend: DockerBackend) -> AsyncIterator[None]:
    yield
    await backend.close()
    assert await backend.engine.network(NETWORK) is None, "the network is left"
    await backend.engine.close()
    assert TABLE not in run("nft list tables"), "the rules are left"
    assert not [name for _, name in socket.if_nameindex() if name.startswith(PREFIX)]


async def reached(sandbox: Sandbox, *targets: tuple[str, int]) -> list[str | None]:
    result = await sandbox.run_code(PROBE, [json.dumps(targets)], timeout=100)
    answers: list[str | None] = json.loads(result["stdout"])
    return answers


async def address_of(sandbox: Sandbox) -> str:
    code = f"import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" \
           f"s.connect(('{SERVER}', 9))\nprint(s.getsockname()[0])"  # fmt: skip
    return (await sandbox.run_code(code))["stdout"].strip()


@ON_EACH
@pytest.mark.case("L02", "L03", "L07", "L08")
async def test_out_and_nowhere_else(
    swept: None, internet: None, make: Make, backend: DockerBackend
) -> None:
    sandbox, peer = await make(BRIDGE), await make(BRIDGE)
    listening = await peer.start_code(LISTEN)
    await anext(listening.output())
    there = await address_of(peer)
    with socket.create_connection((METADATA, PORT), 2) as control:
        assert control.recv(100), "the probe's targets answer this machine"
    with oracles.listening(*((socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0)),)) as listeners:
        port = listeners[0].address[1]
        gateway = there.rpartition(".")[0] + ".1"
        here = [(address, port) for address in (gateway, HERE, *oracles.host_addresses())]
        answers = await reached(sandbox, (SERVER, PORT), (METADATA, PORT), (there, PORT), *here)
        assert answers[0] == HERE, "out, hidden behind this machine"
        assert answers[1:] == [None] * (len(answers) - 1)
        assert listeners[0].hits == 0
    # Nor is it reached, by this machine or through it.
    with pytest.raises(OSError), socket.create_connection((there, PORT), 2):
        pass
    assert await reached(peer, ("127.0.0.1", PORT)) == ["127.0.0.1"], "it does listen"
    usage = await backend.usage(sandbox.sandbox_id)
    assert usage.network_tx_bytes > 0 and usage.network_rx_bytes > 0


@ON_EACH
@pytest.mark.case("L02")
async def test_without_our_rules_it_would_not_hold(swept: None, internet: None, make: Make) -> None:
    """The positive control: the engine alone lets a container speak to its machine."""
    sandbox = await make(BRIDGE)
    with oracles.listening((socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0))) as listeners:
        port = listeners[0].address[1]
        code = f"import socket; socket.create_connection(('{HERE}', {port}), 2)"
        assert (await sandbox.run_code(code))["exit_code"] != 0
        run(f"nft delete table inet {TABLE}")
        assert (await sandbox.run_code(code))["exit_code"] == 0
    await make(BRIDGE)  # which puts them back
    assert TABLE in run("nft list tables")


async def test_where_there_can_be_no_rules_it_is_refused() -> None:
    elsewhere = Engine(Settings(docker_host="tcp://127.0.0.1:1"))
    with pytest.raises(BackendUnavailableError) as refused:
        async with bridge(elsewhere, BRIDGE):
            pass
    for words in (
        "root on the machine of the engine", "services of the engine's machine", "metadata",
        "--allow-degraded firewall",
    ):  # fmt: skip
        assert words in refused.value.message


@ON_EACH
@pytest.mark.case("L07")
async def test_ports_that_are_not_isolated_would_reach_each_other(
    swept: None, internet: None, make: Make
) -> None:
    """The positive control of the other half."""
    sandbox, peer = await make(BRIDGE), await make(BRIDGE)
    listening = await peer.start_code(LISTEN)
    await anext(listening.output())
    there = await address_of(peer)
    assert await reached(sandbox, (there, PORT)) == [None]
    ports = list(Path("/sys/class/net").glob(f"{PREFIX}*/brif/*/isolated"))
    assert len(ports) >= 2 and all(port.read_text() == "1\n" for port in ports)
    if Path("/proc/sys/net/bridge").exists():
        return  # the engine's own rule sees bridged packets too, and would still refuse
    for port in ports:
        port.write_text("0")
    assert await reached(sandbox, (there, PORT)) != [None]


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
@pytest.mark.case("L10")
async def test_a_flood_leaves_the_hosts_table_of_connections_to_others(
    swept: None, internet: None, make: Make
) -> None:
    """UDP and SYN; a neighbour still gets out, and that one comes changes nothing."""

    def connections() -> int:
        return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())

    sandbox, other = await make(BRIDGE), await make(BRIDGE)
    before = connections()
    result = await sandbox.run_code(FLOOD, [SERVER, "10000"], timeout=100)
    assert result["stdout"] == "sent\n", result
    held = connections() - before
    assert held <= MOST + OTHERS, held
    assert held > MOST // 2, "it was no flood: this shows nothing"
    # There is an answer for the neighbour, and none for who has too many already.
    assert await reached(other, (SERVER, PORT)) == [HERE]
    await make(BRIDGE)
    result = await sandbox.run_code(FLOOD, [SERVER, "30000"], timeout=100)
    assert result["stdout"] == "sent\n", result
    assert connections() - before <= MOST + OTHERS
