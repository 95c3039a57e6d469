"""Bridge networks, on real packets and in a world of their own.

Each test runs in a forked child with a network namespace and mounts of its own; this machine's
interfaces and firewall are never touched. The world:

    sandbox eth0 ═ pcl<n>  H, where the library runs  up0 ═ out0  I, the internet
                           203.0.113.1, 198.51.100.7              203.0.113.10, 169.254.169.254, ...

The oracles are sockets held here, outside of the sandbox: what they did not receive did not arrive.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from paracle_sandbox.backends.native import firewall, network, veth
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.records import identified
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError, SandboxCreationError
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.jail import kernel
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import load_settings

pytest.importorskip("pyroute2")
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("nft") or not shutil.which("ip"),
    reason="bridge networks need root and nft, and these tests ip: apt install nftables iproute2",
)

UPLINK, ELSEWHERE = "203.0.113.1", "198.51.100.7"  # the host's
SERVER = "203.0.113.10"
METADATA = ("169.254.169.254", "169.254.0.9", "100.100.100.200", "192.0.0.192", "168.63.129.16")
PORT = 7007
REACHABLE_SECONDS, UNREACHABLE_SECONDS = 20.0, 1.5

# This tries every target at once, and prints what each answered, or None.
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
targets, seconds = json.loads(sys.stdin.readline())
def attempt(target):
    kind, address, port, on_link = target
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, getattr(socket, kind)) as s:
            s.settimeout(seconds)
            if on_link:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
                s.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, 1)
            s.connect((address, port))
            s.send(b"hello")
            return s.recv(100).decode()
    except OSError as error:
        return None
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(list(pool.map(attempt, targets))))
"""

# This answers every connection and datagram, and reports when it is ready.
LISTEN = """
import select, socket
tcp = socket.create_server(("0.0.0.0", 7007))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 7007))
print("ready", flush=True)
while True:
    for s in select.select([tcp, udp], [], [])[0]:
        if s is tcp:
            c, peer = s.accept()
            c.send(peer[0].encode())
            c.close()
        else:
            data, peer = s.recvfrom(100)
            s.sendto(peer[0].encode(), peer)
"""

Target = tuple[str, str, int, bool]
Pair = tuple[socket.socket, socket.socket]  # TCP and UDP
Process = get_context("fork").Process


class World:
    """The namespaces H and I, and the sockets that listen in them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        _pass_over_instances(directory / "state" / "instances", 100 + os.getpid() % 900)
        self.internet = _new_namespace()
        path = f"/proc/{os.getpid()}/fd/{self.internet}"
        # It is off, as on a machine without containers: a new namespace takes the host's setting.
        Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
        run("ip link set lo up")
        run(f"ip address add {ELSEWHERE}/32 dev lo")
        run(f"ip link add up0 type veth peer name out0 netns {path}")
        run(f"ip address add {UPLINK}/24 dev up0")
        run("ip link set up0 up")
        inside = f"nsenter --net={path} "
        for address in (f"{SERVER}/24", *(f"{a}/32" for a in METADATA)):
            run(f"{inside}ip address add {address} dev out0")
        run(f"{inside}ip link set out0 up")
        run(f"{inside}ip route add {veth.SANDBOXES} via {UPLINK}")
        run(f"ip route add default via {SERVER}")

    def backend(self) -> NativeBackend:
        settings = load_settings(
            {
                "PARACLE_STATE_DIR": str(self.directory / "state"),
                "PARACLE_DATA_DIR": str(self.directory / "data"),
                "PARACLE_TEMPLATE_BUILD": "0",
                "PATH": os.environ["PATH"],
            }
        )
        return NativeBackend(settings)

    def listen(self, address: str, *, internet: bool = False) -> Pair:
        def make() -> Pair:
            tcp = socket.create_server((address, PORT), backlog=64)
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            udp.bind((address, PORT))
            return tcp, udp

        pair = within(self.internet, make) if internet else make()
        for one in pair:
            one.setblocking(False)
        return pair


def run(command: str, text: str | None = None) -> str:
    done = subprocess.run(command.split(), input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _pass_over_instances(directory: Path, count: int) -> None:
    """Hold the instance numbers of our state directory that this machine may use.

    The uids of sandboxes follow from the numbers, which each state directory counts anew: this test
    must not meet a sandbox of this machine. One lock holds all of them, as they are one file; it is
    kept until this process ends.
    """
    directory.mkdir(parents=True, mode=0o700)
    fcntl.flock(os.open(directory / "0", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_EX)
    for number in range(1, count):
        os.link(directory / "0", directory / str(number))


def _new_namespace() -> int:
    def make() -> int:
        kernel.unshare(kernel.CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def within(namespace: int, action: Callable[[], Any]) -> Any:
    def enter_and_act() -> Any:
        kernel.setns(namespace, kernel.CLONE_NEWNET)
        return action()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter_and_act).result()


def apart(test: Callable[[], None]) -> None:
    """Run `test` in a child that is a machine of its own as far as networks are concerned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
            kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            kernel.mount("tmpfs", "/run", "tmpfs")
            # A new network inherits this from the machine, where an engine may have set it.
            Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
            test()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, message or f"the child ended with status {status}"


def in_world(directory: Path, test: Callable[[World], Awaitable[None]]) -> None:
    async def body() -> None:
        await test(World(directory))

    apart(lambda: asyncio.run(body()))


async def start(backend: NativeBackend, mode: str = "bridge") -> Sandbox:
    config = SandboxConfig(network_mode=mode, memory_mb=256)  # type: ignore[arg-type]
    sandbox = Sandbox(backend, new_sandbox_id(), config)
    await sandbox.start()
    return sandbox


def namespace_inode(backend: NativeBackend, sandbox: Sandbox) -> int:
    return os.stat(f"/proc/{backend.init_pid(sandbox.id)}/ns/net").st_ino


@contextmanager
def namespace(backend: NativeBackend, sandbox: Sandbox) -> Iterator[int]:
    fd = os.open(f"/proc/{backend.init_pid(sandbox.id)}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def addresses(backend: NativeBackend, sandbox: Sandbox) -> tuple[str, str]:
    """Return the addresses of the sandbox and of the host's end of its link."""
    with namespace(backend, sandbox) as fd:
        shown = within(fd, lambda: json.loads(run("ip -json route")))
    gateway = next(route["gateway"] for route in shown if route["dst"] == "default")
    own = next(route["prefsrc"] for route in shown if "prefsrc" in route)
    return own, gateway


async def probe(
    sandbox: Sandbox, targets: list[Target], seconds: float = UNREACHABLE_SECONDS
) -> list[str | None]:
    program = PROBE.replace("sys.stdin.readline()", repr(json.dumps([targets, seconds])))
    result = await sandbox.run_code(program)
    assert result["exit_code"] == 0, result
    answers: list[str | None] = json.loads(result["stdout"])
    return answers


def both(address: str, *, on_link: bool = False) -> list[Target]:
    return [(kind, address, PORT, on_link) for kind in ("SOCK_STREAM", "SOCK_DGRAM")]


def answer_on(loop: asyncio.AbstractEventLoop, pair: Pair) -> None:
    """Answer every client with its own address."""
    tcp, udp = pair

    def on_connection() -> None:
        connection, peer = tcp.accept()
        with connection:
            connection.send(peer[0].encode())

    def on_datagram() -> None:
        _, peer = udp.recvfrom(100)
        udp.sendto(peer[0].encode(), peer)

    loop.add_reader(tcp, on_connection)
    loop.add_reader(udp, on_datagram)


def is_untouched(pair: Pair) -> bool:
    tcp, udp = pair
    try:
        tcp.accept()
    except BlockingIOError:
        pass
    else:
        return False
    try:
        udp.recvfrom(100)
    except BlockingIOError:
        return True
    return False


def links() -> list[str]:
    return [name for _, name in socket.if_nameindex() if name.startswith("pcl")]


def tables() -> str:
    return run("nft list tables")


def namespaces_of_processes() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(path.stat().st_ino)
        except OSError:
            continue  # it ended meanwhile
    return found


async def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


def weaken() -> None:
    """Set up NAT without our rules, which a probe must notice."""
    run("nft delete table inet paracle_sandbox")
    chain = "type nat hook postrouting priority srcnat; policy accept;"
    rule = 'oifname "up0" masquerade'
    run("nft -f -", f"table inet weak {{\n chain out {{\n {chain}\n {rule}\n }}\n}}\n")
    run("sysctl -qw net.ipv4.conf.all.rp_filter=0")


# -- out -----------------------------------------------------------------------------------


def test_a_sandbox_reaches_a_server_and_is_seen_as_its_host(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer_on(asyncio.get_running_loop(), world.listen(SERVER, internet=True))
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "0\n"
        backend = world.backend()
        sandbox = await start(backend)
        try:
            answers = await probe(sandbox, both(SERVER), REACHABLE_SECONDS)
            assert answers == [UPLINK, UPLINK]
        finally:
            await sandbox.stop()
            await backend.close()

    in_world(tmp_path, test)


def test_eight_at_once_have_a_network_each(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        answer_on(asyncio.get_running_loop(), world.listen(SERVER, internet=True))
        backend = world.backend()
        sandboxes = await asyncio.gather(*(start(backend) for _ in range(8)))
        assert len(set(links())) == 8
        assert len({addresses(backend, sandbox) for sandbox in sandboxes}) == 8
        answers = await asyncio.gather(
            *(probe(sandbox, both(SERVER), REACHABLE_SECONDS) for sandbox in sandboxes)
        )
        assert answers == [[UPLINK, UPLINK]] * 8
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
        await backend.close()
        await eventually(lambda: not links())

    in_world(tmp_path, test)


def test_forwarding_is_on_for_all_when_many_switch_it_on_at_once(tmp_path: Path) -> None:
    """When two processes write it at once, the kernel sometimes ignores both and reports it as
    on."""

    async def test(world: World) -> None:
        with ExitStack() as processes:
            pids = [processes.enter_context(idle_process()) for _ in range(8)]
            for _ in range(20):
                run("sysctl -qw net.ipv4.ip_forward=0")
                made = await asyncio.gather(*(network.attach(identified(pid)) for pid in pids))
                settings = Path("/proc/sys/net/ipv4/conf").glob("*/forwarding")
                assert [path for path in settings if path.read_text() != "1\n"] == []
                await network.detach(*made)

    in_world(tmp_path, test)


def test_without_a_network_there_is_only_loopback(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        backend = world.backend()
        sandbox = await start(backend, "none")
        try:
            with namespace(backend, sandbox) as fd:
                names = within(fd, lambda: [name for _, name in socket.if_nameindex()])
            assert names == ["lo"]
            assert await probe(sandbox, both(SERVER)) == [None, None]
            assert not links() and not tables()
        finally:
            await sandbox.stop()
            await backend.close()

    in_world(tmp_path, test)


# Every third packet is lost, in the order in which they come: the same loss in each run.
LOSS = """table inet loss {
    chain through {
        type filter hook forward priority -10; policy accept;
        numgen inc mod 3 0 counter drop
    }
}
"""


def test_a_network_that_loses_packets_is_slower_and_no_wider(tmp_path: Path) -> None:
    """R23: with a third of all packets lost, traffic still has only the one way out."""

    async def test(world: World) -> None:
        answer_on(asyncio.get_running_loop(), world.listen(SERVER, internet=True))
        canaries = [world.listen(UPLINK), *(world.listen(a, internet=True) for a in METADATA)]
        backend = world.backend()
        run("nft -f -", LOSS)
        sandbox = await start(backend)
        try:
            ways: set[str] = set()
            for _ in range(10):  # a lost datagram is no fault: another one gets through
                targets = both(SERVER) * 6
                answers = await probe(sandbox, targets, UNREACHABLE_SECONDS)
                assert set(answers) <= {UPLINK, None}, answers
                ways |= {t[0] for t, answer in zip(targets, answers, strict=True) if answer}
                if len(ways) == 2:
                    break
            assert ways == {"SOCK_STREAM", "SOCK_DGRAM"}
            forbidden = [target for a in (UPLINK, *METADATA) for target in both(a)]
            assert set(await probe(sandbox, forbidden)) == {None}
            assert all(map(is_untouched, canaries))
            lost = json.loads(run("nft --json list chain inet loss through"))["nftables"]
            rule = next(one["rule"] for one in lost if "rule" in one)
            assert any(part.get("counter", {}).get("packets", 0) > 3 for part in rule["expr"])
        finally:
            await sandbox.stop()
            await backend.close()
        await eventually(lambda: not links())

    in_world(tmp_path, test)


LOOK_UP = """
import socket
try:
    print(socket.getaddrinfo("index.example", 443))
except socket.gaierror as error:
    print("no answer")
"""


def test_a_dead_name_server_is_asked_and_no_other(tmp_path: Path) -> None:
    """R23: the sandbox starts, a lookup fails inside, and no other server sees the name."""

    def name_server(address: str) -> socket.socket:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind((address, 53))
        server.setblocking(False)
        return server

    async def test(world: World) -> None:
        servers = tmp_path / "resolv.conf"
        servers.write_text(f"nameserver {SERVER}\noptions timeout:1 attempts:1\n")
        kernel.mount(str(servers), "/etc/resolv.conf", "", kernel.MS_BIND)
        dead = within(world.internet, lambda: name_server(SERVER))
        others = [
            name_server(UPLINK),
            name_server("127.0.0.1"),
            *within(world.internet, lambda: [name_server(address) for address in METADATA]),
        ]
        backend = world.backend()
        sandbox = await start(backend)
        try:
            result = await sandbox.run_code(LOOK_UP)
            assert result["stdout"] == "no answer\n", result
            assert b"\x05index\x07example" in dead.recv(1000), "it was asked: this shows something"
            for other in others:
                with pytest.raises(BlockingIOError):
                    other.recv(1000)
        finally:
            await sandbox.stop()
            await backend.close()

    in_world(tmp_path, test)


# -- what it must not reach ----------------------------------------------------------------


async def _forbidden(world: World, weakened: bool) -> None:
    """Probe everything that a sandbox must not reach.

    Without our rules, the same probes get through.
    """
    canaries = {UPLINK: world.listen(UPLINK), ELSEWHERE: world.listen(ELSEWHERE)}
    canaries |= {address: world.listen(address, internet=True) for address in METADATA}
    loopback = world.listen("127.0.0.1")
    backend = world.backend()
    sandbox, neighbour = await start(backend), await start(backend)
    _, gateway = addresses(backend, sandbox)
    other, other_gateway = addresses(backend, neighbour)
    canaries |= {address: world.listen(address) for address in (gateway, other_gateway)}
    listener = await neighbour.start_code(LISTEN)
    await eventually(lambda: listening(backend, neighbour))
    if weakened:
        weaken()
        for pair in canaries.values():
            answer_on(asyncio.get_running_loop(), pair)
    seconds = REACHABLE_SECONDS if weakened else UNREACHABLE_SECONDS
    places = [*canaries, other]
    targets = [target for address in places for target in both(address)]
    on_link = [target for address in (gateway, UPLINK) for target in both(address, on_link=True)]
    answers = await probe(sandbox, [*targets, *on_link], seconds)
    reached = {t for t, answer in zip([*targets, *on_link], answers, strict=True) if answer}
    if weakened:
        assert not {*targets, *on_link} - reached
    else:
        assert not reached
        assert [a for a, pair in canaries.items() if not is_untouched(pair)] == []
    assert await probe(sandbox, both("127.0.0.1")) == [None, None]
    assert is_untouched(loopback)
    await listener.kill()
    await asyncio.gather(sandbox.stop(), neighbour.stop())
    await backend.close()


def listening(backend: NativeBackend, sandbox: Sandbox) -> bool:
    tables = [
        Path(f"/proc/{backend.init_pid(sandbox.id)}/net/{kind}").read_text()
        for kind in ("tcp", "udp")
    ]
    return all(f":{PORT:04X}" in table for table in tables)


def test_host_metadata_and_neighbours_are_out_of_reach(tmp_path: Path) -> None:
    in_world(tmp_path, lambda world: _forbidden(world, weakened=False))


def test_the_probes_notice_when_the_rules_are_gone(tmp_path: Path) -> None:
    in_world(tmp_path, lambda world: _forbidden(world, weakened=True))


def test_a_published_port_of_the_host_is_no_way_in(tmp_path: Path) -> None:
    """Another program forwards a port of the host elsewhere, as Docker does."""

    async def test(world: World) -> None:
        answer_on(asyncio.get_running_loop(), world.listen(SERVER, internet=True))
        chain = "type nat hook prerouting priority dstnat; policy accept;"
        rule = f"fib daddr type local tcp dport 8080 dnat ip to {SERVER}:{PORT}"
        run("nft -f -", f"table inet published {{\n chain in {{\n {chain}\n {rule}\n }}\n}}\n")
        backend = world.backend()
        sandbox = await start(backend)
        target: Target = ("SOCK_STREAM", UPLINK, 8080, False)
        assert await probe(sandbox, [target]) == [None]
        weaken()
        assert await probe(sandbox, [target], REACHABLE_SECONDS) == [UPLINK]
        await sandbox.stop()
        await backend.close()

    in_world(tmp_path, test)


def test_nobody_outside_opens_a_connection_to_a_sandbox(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        backend = world.backend()
        sandbox = await start(backend)
        own, _ = addresses(backend, sandbox)
        listener = await sandbox.start_code(LISTEN)
        await eventually(lambda: listening(backend, sandbox))

        def knock(seconds: float) -> bool:
            try:
                with socket.create_connection((own, PORT), timeout=seconds) as connection:
                    return bool(connection.recv(100))
            except OSError:
                return False

        assert not await asyncio.to_thread(knock, UNREACHABLE_SECONDS)
        assert not await asyncio.to_thread(within, world.internet, lambda: knock(1.0))
        weaken()
        assert await asyncio.to_thread(knock, REACHABLE_SECONDS)
        await listener.kill()
        await sandbox.stop()
        await backend.close()

    in_world(tmp_path, test)


def test_there_is_no_ipv6(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        backend = world.backend()
        sandbox = await start(backend)
        with namespace(backend, sandbox) as fd:
            inside = within(fd, lambda: Path("/proc/thread-self/net/if_inet6").read_text())
        assert [line.split()[-1] for line in inside.splitlines() if "lo" not in line] == []
        assert not [x for x in Path("/proc/net/if_inet6").read_text().split() if x in links()]
        targets: list[Target] = [("SOCK_STREAM", "2001:db8::1", PORT, False)]
        assert await probe(sandbox, targets) == [None]
        await sandbox.stop()
        await backend.close()

    in_world(tmp_path, test)


def test_only_its_own_source_address_passes(tmp_path: Path) -> None:
    """A sandbox cannot make raw sockets. This tests the rules in case that it could."""

    async def test(world: World) -> None:
        canary = world.listen(SERVER, internet=True)
        backend = world.backend()
        sandbox, neighbour = await start(backend), await start(backend)
        own, gateway = addresses(backend, sandbox)
        other, _ = addresses(backend, neighbour)
        around = [str(IPv4Address(own) + step) for step in (-2, 1, 4)]
        forged = [gateway, other, *around, "127.0.0.1", UPLINK, ELSEWHERE, SERVER, "198.18.0.9"]
        with namespace(backend, sandbox) as fd:
            within(fd, lambda: send_forged(forged))
            within(fd, lambda: send_forged([own]))
        assert await received_until(canary[1], own) == {own}
        weaken()
        outsiders = ["198.18.0.9", other, own]
        with namespace(backend, sandbox) as fd:
            within(fd, lambda: send_forged(outsiders))
        assert await received_until(canary[1], own) == set(outsiders), "the probe cannot fail"
        await asyncio.gather(sandbox.stop(), neighbour.stop())
        await backend.close()

    in_world(tmp_path, test)


async def received_until(udp: socket.socket, last: str) -> set[str]:
    received: set[str] = set()

    def arrived() -> bool:
        try:
            received.add(udp.recvfrom(100)[0].decode())
        except BlockingIOError:
            return False
        return last in received

    await eventually(arrived)
    return received


def send_forged(sources: list[str]) -> None:
    """Send a datagram from each of the addresses, with the address in it."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for source in sources:
            payload = source.encode()
            udp = struct.pack(">HHHH", 4000, PORT, 8 + len(payload), 0) + payload
            header = struct.pack(
                ">BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, 0, 64, socket.IPPROTO_UDP, 0,
                socket.inet_aton(source), socket.inet_aton(SERVER),
            )  # fmt: skip
            raw.sendto(header + udp, (SERVER, 0))


# -- what it leaves ------------------------------------------------------------------------

# -- floods --------------------------------------------------------------------------------

# They come from one port, which a program has without limits, and go to as many as it likes.
FLOOD = """
import socket, sys
first = int(sys.argv[2])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for port in range(first, first + 12000):
    try:
        udp.sendto(b"x", (sys.argv[1], port))
    except OSError:
        pass
syn = []
for port in range(first + 12000, first + 12400):
    tcp = socket.socket()
    tcp.setblocking(False)
    tcp.connect_ex((sys.argv[1], port))
    syn.append(tcp)
print("sent")
"""


@pytest.mark.case("L10")
def test_a_flood_leaves_the_hosts_table_of_connections_to_others(tmp_path: Path) -> None:
    """The flood is UDP and SYN. A neighbour still gets out, and its arrival changes nothing."""

    def connections() -> int:
        return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())

    async def test(world: World) -> None:
        answer_on(asyncio.get_running_loop(), world.listen(SERVER, internet=True))
        backend = world.backend()
        sandbox, other = await start(backend), await start(backend)
        try:
            before = connections()
            result = await sandbox.run_code(FLOOD, args=[SERVER, "10000"])
            assert result["stdout"] == "sent\n", result
            held = connections() - before
            assert held <= 4096 + 64, held
            assert held > 2000, "it was no flood: this shows nothing"
            # The neighbour gets an answer, and a program that has too many connections gets none.
            assert await probe(other, both(SERVER), REACHABLE_SECONDS) == [UPLINK, UPLINK]
            assert connections() - before <= 4096 + 128
            third = await start(backend)
            await third.stop()
            result = await sandbox.run_code(FLOOD, args=[SERVER, "30000"])
            assert result["stdout"] == "sent\n", result
            assert connections() - before <= 4096 + 128
        finally:
            await sandbox.stop()
            await other.stop()
            await backend.close()

    in_world(tmp_path, test)


def test_nothing_is_left_after_the_last_one(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        backend = world.backend()
        first = await start(backend)  # a connection that was opened stays open
        before = threads_and_descriptors()
        second = await start(backend)
        inodes = {namespace_inode(backend, sandbox) for sandbox in (first, second)}
        assert len(links()) == 2
        await second.stop()
        await eventually(lambda: len(links()) == 1)
        assert threads_and_descriptors() == before
        await network.sweep()
        assert firewall.TABLE in tables(), "the first one still needs it"
        await first.stop()
        await eventually(lambda: not links())
        await network.sweep()
        assert tables() == ""
        assert not inodes & namespaces_of_processes()
        await backend.close()

    in_world(tmp_path, test)


def threads_and_descriptors() -> tuple[set[str], list[str]]:
    named = {thread.name for thread in threading.enumerate() if thread.name.startswith("network")}
    opened = []
    for number in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
        except FileNotFoundError:
            continue  # this line belongs to the listing
    return named, sorted(kind for kind in opened if kind in ("net", "socket"))


@pytest.mark.parametrize("how", ["start", "sweep"])
def test_what_a_killed_owner_left_is_gone_with_the_next(how: str, tmp_path: Path) -> None:
    """The kernel removes its link. The next owner finds and removes its table of rules."""

    async def own(world: World, made: Any) -> None:
        await start(world.backend())
        made.set()
        await asyncio.sleep(60)

    async def test(world: World) -> None:
        made = get_context("fork").Event()
        owner = Process(target=lambda: asyncio.run(own(world, made)))
        owner.start()
        try:
            assert await asyncio.to_thread(made.wait, 30)
        finally:
            owner.kill()
            owner.join()
        await eventually(lambda: not links())
        assert firewall.TABLE in tables(), "nothing is left: nothing is shown"
        backend = world.backend()
        if how == "sweep":
            await backend.sweep()
        else:
            await start(backend, "none")
        assert tables() == ""
        await backend.close()

    in_world(tmp_path, test)


def test_detach_removes_the_link_of_a_living_namespace(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        with idle_process() as pid:
            link = await network.attach(identified(pid))
            assert links() == [link.name]
            await network.detach(link)
            assert links() == [] and tables() == ""
            await network.detach(link)
            await network.sweep()

    in_world(tmp_path, test)


def install_nft(directory: Path, script: str) -> None:
    """Put a script in the place of nft. ``{real}`` in it is the path of the real one."""
    real = shutil.which("nft")
    assert real is not None
    directory.mkdir()
    (directory / "nft").write_text(f"#!/bin/sh\n{script.format(real=real)}\n")
    (directory / "nft").chmod(0o755)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"


# This script waits before it removes the table, so that another process can come in between.
SLOW_NFT = """
[ "$1" = -f ] || exec {real} "$@"
rules=$(cat)
case "$rules" in *chain*) ;; *) sleep 0.1 ;; esac
printf '%s\\n' "$rules" | {real} -f -
"""


def test_processes_that_come_and_go_never_lose_the_rules(tmp_path: Path) -> None:
    """The sweep of one process must not remove the table that another's new link needs."""

    async def come_and_go() -> None:
        with idle_process() as pid:
            for _ in range(10):
                link = await network.attach(identified(pid))
                assert firewall.TABLE in tables()
                await network.detach(link)

    def test() -> None:
        install_nft(tmp_path / "bin", SLOW_NFT)
        processes = [Process(target=lambda: asyncio.run(come_and_go())) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
        assert links() == [] and tables() == ""

    apart(test)


# -- what goes wrong -----------------------------------------------------------------------


@contextmanager
def idle_process() -> Iterator[int]:
    """Start a process with a network namespace of its own."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_a_failed_attachment_leaves_nothing(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        with idle_process() as pid:
            link = await network.attach(identified(pid))
            with pytest.raises(SandboxCreationError, match="a network already"):
                await network.attach(identified(pid))
            assert links() == [link.name]
            await network.detach(link)
        with pytest.raises(SandboxCreationError, match="the host's network"):
            await network.attach(identified(os.getpid()))
        with pytest.raises(SandboxCreationError) as caught:
            await network.attach(identified(pid))
        assert caught.value.step == "network namespace"
        assert links() == [] and tables() == ""

    in_world(tmp_path, test)


def test_refused_rules_remove_the_link_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        install_nft(world.directory / "bin", "echo no rules today >&2; exit 1")
        with idle_process() as pid:
            with pytest.raises(SandboxCreationError, match="no rules today"):
                await network.attach(identified(pid))
            assert links() == []

    in_world(tmp_path, test)


def test_a_host_that_cannot_forward_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Its settings cannot be written, as in a container. The rules are in force by then."""

    async def test(world: World) -> None:
        (world.directory / "off").write_text("0")
        forward = "/proc/sys/net/ipv4/ip_forward"
        kernel.bind(str(world.directory / "off"), forward, kernel.ATTR_RDONLY)
        with idle_process() as pid:
            with pytest.raises(SandboxCreationError, match=forward) as caught:
                await network.attach(identified(pid))
        assert caught.value.step == "network forwarding"
        assert links() == [] and tables() == ""

    in_world(tmp_path, test)


def test_a_cancelled_attachment_leaves_nothing(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        with idle_process() as pid:
            for delay in (0.0, 0.005, 0.02, 0.05):
                task = asyncio.ensure_future(network.attach(identified(pid)))
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    await network.detach(task.result())
                assert links() == [] and tables() == ""

    in_world(tmp_path, test)


def _attach_error() -> str:
    with idle_process() as pid, pytest.raises(BackendUnavailableError) as caught:
        asyncio.run(network.attach(identified(pid)))
    return str(caught.value)


def test_without_nft_the_error_names_the_package(tmp_path: Path) -> None:
    def test() -> None:
        program = shutil.which("nft")
        assert program is not None
        # Hidden from execution and from `which`: a file without permission to execute it.
        (tmp_path / "nothing").touch(0o644)
        kernel.bind(str(tmp_path / "nothing"), os.path.realpath(program))
        assert "apt install nftables" in _attach_error()

    apart(test)


def test_without_pyroute2_the_error_names_the_extra() -> None:
    def test() -> None:
        import sys

        sys.modules["pyroute2"] = None  # type: ignore[assignment]
        assert "pip install '.[network]'" in _attach_error()
        asyncio.run(network.sweep())

    apart(test)


def test_without_root_the_error_says_so() -> None:
    def test() -> None:
        os.seteuid(65534)
        with pytest.raises(BackendUnavailableError, match="needs root") as caught:
            asyncio.run(network.attach(identified(os.getpid())))
        assert "network_mode=none" in str(caught.value)

    apart(test)
