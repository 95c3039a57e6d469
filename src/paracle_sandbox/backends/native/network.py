"""network_mode="bridge": a way out for a sandbox, and only out.

A sandbox gets `eth0`, one end of a virtual cable whose other end is `pcl<number>` on the host.
The number is taken by making the link, and gives the four addresses of the cable:
network, host, sandbox, broadcast. `firewall.py` says what may pass.

Order of an attachment: the link is made while both ends are down, then the rules are put in
force, then the ends are brought up, so that nothing passes unfiltered. A lock that attachments
share and a sweep has for itself keeps the sweep from removing the table under a link that was
made since it looked.

Forwarding is switched on for the host (`net.ipv4.ip_forward`) if it was off, and stays on:
others may have come to rely on it. A host that must not pass on packets of others says so in its
own firewall.

The link goes with the namespace of the sandbox, also when the owner is killed. What may then be
left is the table, which does nothing without links; the next sweep removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, TypeVar

from ...errors import BackendUnavailableError, SandboxCleanupError, SandboxCreationError
from . import firewall

Outcome = TypeVar("Outcome")

# The range that sandboxes have their addresses from. Choose another where it is in use.
SANDBOXES = IPv4Network("10.213.0.0/16")
PREFIX = "pcl"

_ADDRESSES_A_LINK = 4
_LINKS = SANDBOXES.num_addresses // _ADDRESSES_A_LINK
_OURS = re.compile(PREFIX + r"[0-9]+\Z")
_LOCK = "/run/paracle-sandbox-network.lock"
_LOCK_SECONDS = 30.0
_CLONE_NEWNET = 0x40000000
_SYSCTL = Path("/proc/sys/net")


@dataclass(frozen=True)
class Link:
    """The host's end of a cable. The index is never used twice, unlike the name."""

    number: int
    index: int

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.number}"

    @property
    def gateway(self) -> IPv4Address:
        return SANDBOXES[self.number * _ADDRESSES_A_LINK + 1]

    @property
    def address(self) -> IPv4Address:
        return SANDBOXES[self.number * _ADDRESSES_A_LINK + 2]


def missing() -> list[str]:
    """What this machine lacks for bridge networks, each with its remedy."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append("root (or use network_mode=none)")
    if firewall.find_nft() is None:
        lacks.append(firewall.NFT_MISSING)
    if find_spec("pyroute2") is None:
        lacks.append("pyroute2 (pip install 'paracle-sandbox[network]')")
    return lacks


async def attach(init_pid: int) -> Link:
    """Give the network namespace of a process, which must have none but loopback, a way out.

    On failure nothing is left. Raises BackendUnavailableError when the machine cannot do it,
    SandboxCreationError with the name of the step otherwise."""
    work = asyncio.ensure_future(asyncio.to_thread(_attach, init_pid))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # A thread cannot be stopped. It is waited for, so that whoever cleans up finds it all.
        await asyncio.wait([work])
        if not work.cancelled() and work.exception() is None:
            await detach(work.result())
        raise


async def detach(*links: Link) -> None:
    """Remove links, if they are still there, and the firewall table after the last of all.

    Raises SandboxCleanupError when something stays."""
    await asyncio.to_thread(_detach, links)


async def sweep() -> None:
    """Remove the firewall table if no sandbox, of any process, has a link."""
    await asyncio.to_thread(_sweep)


# -- the host's end ----------------------------------------------------------------------


def _attach(init_pid: int) -> Link:
    if lacks := missing():
        raise BackendUnavailableError(
            f"network_mode=bridge needs {', and '.join(lacks)}.", step="network"
        )
    with _namespace_of(init_pid) as namespace, _lock(fcntl.LOCK_SH):
        with _step("network namespace"):
            _inside(namespace, _prepare_inside)
        link = _make_link(namespace)
        try:
            _connect(link, namespace)
        except BaseException:
            _remove_links((link,))
            raise
    return link


def _connect(link: Link, namespace: int) -> None:
    firewall.load(PREFIX, SANDBOXES)
    with _step("network forwarding"):
        _switch(_SYSCTL / "ipv4/ip_forward")
    with _step("network address"):
        _without_ipv6(link.name)
        _configure(link.index, link.gateway)
    with _step("network route"):
        _inside(namespace, lambda: _connect_inside(link.address, link.gateway))


def _make_link(namespace: int) -> Link:
    """A free number, from anywhere in the range: the one that was freed last may still have
    packets on their way to it."""
    first = secrets.randbelow(_LINKS)
    peer = {"ifname": "eth0", "net_ns_fd": namespace}
    pyroute2 = _pyroute2()
    with _step("network link"), pyroute2.IPRoute() as netlink:
        for number in (*range(first, _LINKS), *range(first)):
            name = f"{PREFIX}{number}"
            try:
                netlink.link("add", ifname=name, kind="veth", peer=peer)
            except pyroute2.NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise
            else:
                return Link(number, socket.if_nametoindex(name))
    raise SandboxCreationError(f"All {_LINKS} networks are in use.", step="network link")


def _detach(links: tuple[Link, ...]) -> None:
    try:
        _remove_links(links)
    except SandboxCreationError as error:
        raise SandboxCleanupError(f"A network link could not be removed: {error}") from error
    _sweep()


def _remove_links(links: tuple[Link, ...]) -> None:
    if not links:
        return
    pyroute2 = _pyroute2()
    with _step("network link"), pyroute2.IPRoute() as netlink:
        for link in links:
            try:
                netlink.link("del", index=link.index)
            except pyroute2.NetlinkError as error:
                if error.code != errno.ENODEV:  # it went with its namespace
                    raise


def _sweep() -> None:
    if missing():
        return  # what could not be made is not there
    try:
        with _lock(fcntl.LOCK_EX):
            if not any(_OURS.match(name) for _, name in socket.if_nameindex()):
                firewall.remove()
    except SandboxCreationError as error:
        raise SandboxCleanupError(f"The firewall table was not removed: {error}") from error


# -- either end --------------------------------------------------------------------------


def _configure(index: int, address: IPv4Address) -> None:
    with _pyroute2().IPRoute() as netlink:
        netlink.addr("add", index=index, address=str(address), prefixlen=30)
        netlink.link("set", index=index, state="up")


def _prepare_inside() -> None:
    """Before there is an interface, so that it never has an IPv6 address, not even briefly."""
    others = [name for _, name in socket.if_nameindex() if name == "eth0"]
    if others:
        raise OSError(errno.EEXIST, "there is a network already", *others)
    _without_ipv6("default")


def _connect_inside(address: IPv4Address, gateway: IPv4Address) -> None:
    _without_ipv6("eth0")
    _configure(socket.if_nametoindex("eth0"), address)
    with _pyroute2().IPRoute() as netlink:
        netlink.route("add", dst="default", gateway=str(gateway))


def _without_ipv6(interface: str) -> None:
    if (_SYSCTL / "ipv6").is_dir():
        _switch(_SYSCTL / "ipv6/conf" / interface / "disable_ipv6")


def _switch(setting: Path) -> None:
    """On, if it is not: where settings are read-only, those that are right are good enough."""
    if setting.read_text().strip() != "1":
        setting.write_text("1")


def _pyroute2() -> Any:
    """Imported late: it is an extra, and takes its time. A connection it makes is to the
    network namespace of the calling thread."""
    import pyroute2  # type: ignore[import-untyped]

    return pyroute2


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, _pyroute2().NetlinkError) as error:
        raise SandboxCreationError(
            f"The sandbox could not be given a network ({name}): {error}", step=name
        ) from error


# -- namespaces and the lock -------------------------------------------------------------


@contextlib.contextmanager
def _namespace_of(pid: int) -> Iterator[int]:
    """A descriptor of the network namespace of a process, which must not be ours."""
    with _step("network namespace"):
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _step("network namespace"):
            if os.path.samestat(os.fstat(namespace), os.stat("/proc/thread-self/ns/net")):
                raise OSError(errno.EINVAL, "the process has the host's network")
        yield namespace
    finally:
        os.close(namespace)


def _inside(namespace: int, action: Callable[[], Outcome]) -> Outcome:
    """Do something in another network namespace, in a thread that ends with it: a thread that
    has been elsewhere is never used again."""

    def enter_and_act() -> Outcome:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(ctypes.c_int(namespace), ctypes.c_int(_CLONE_NEWNET)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "setns")
        return action()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="network") as thread:
        return thread.submit(enter_and_act).result()


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    """Between the processes of this machine. Root's own file: nobody else can hold it."""
    with _step("network lock"):
        file = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with _step("network lock"):
            _wait_for_lock(file, kind)
        yield
    finally:
        os.close(file)


def _wait_for_lock(file: int, kind: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.003)
