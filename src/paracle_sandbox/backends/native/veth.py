"""A virtual cable between the host and a sandbox: `pcl<number>` here, `eth0` there.

The number is taken by making the link, and gives the cable its four addresses: network, host,
sandbox, broadcast. What is done to the sandbox's end is done by a thread that enters the
namespace and ends there; the cable goes with the namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from ...errors import SandboxCreationError
from .records import has_ended, pidfd_of

# Where the addresses come from. Choose another range where this one is in use.
SANDBOXES = IPv4Network("10.213.0.0/16")
PREFIX = "pcl"

_ADDRESSES_A_LINK = 4
_LINKS = SANDBOXES.num_addresses // _ADDRESSES_A_LINK
_SYSCTL = Path("/proc/sys/net")
_CLONE_NEWNET = 0x40000000


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


def make(namespace: int) -> Link:
    """A new cable into a namespace, with both ends down."""
    with step("network namespace"):
        _inside(namespace, _prepare_inside)
    peer = {"ifname": "eth0", "net_ns_fd": namespace}
    # From anywhere in the range: to the number freed last, packets may be on their way still.
    first = secrets.randbelow(_LINKS)
    pyroute2 = _pyroute2()
    with step("network link"), pyroute2.IPRoute() as netlink:
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


def forward(link: Link) -> None:
    """Let the host pass packets on, and from this link, if it does not. One at a time: of two
    that switch it on at once, the kernel may heed neither and yet say that it is on."""
    with step("network forwarding"):
        _switch_on(_SYSCTL / "ipv4/ip_forward")
        _switch_on(_SYSCTL / "ipv4/conf" / link.name / "forwarding")


def connect(link: Link, namespace: int) -> None:
    """Give both ends their addresses and bring them up."""
    with step("network address"):
        _refuse_ipv6(link.name)
        _configure(link.index, link.gateway)
    with step("network route"):
        _inside(namespace, lambda: _connect_inside(link))


def remove(*links: Link) -> None:
    """List those that are still there."""
    pyroute2 = _pyroute2()
    with step("network link"), pyroute2.IPRoute() as netlink:
        for link in links:
            try:
                netlink.link("del", index=link.index)
            except pyroute2.NetlinkError as error:
                if error.code != errno.ENODEV:  # it went with its namespace
                    raise


def _prepare_inside() -> None:
    """Before there is an interface, so that it never has an IPv6 address, not even briefly."""
    if "eth0" in (name for _, name in socket.if_nameindex()):
        raise OSError(errno.EEXIST, "there is a network already", "eth0")
    _refuse_ipv6("default")


def _connect_inside(link: Link) -> None:
    _refuse_ipv6("eth0")
    _configure(socket.if_nametoindex("eth0"), link.address)
    with _pyroute2().IPRoute() as netlink:
        netlink.route("add", dst="default", gateway=str(link.gateway))


def _configure(index: int, address: IPv4Address) -> None:
    with _pyroute2().IPRoute() as netlink:
        netlink.addr("add", index=index, address=str(address), prefixlen=30)
        netlink.link("set", index=index, state="up")


def _refuse_ipv6(interface: str) -> None:
    if (_SYSCTL / "ipv6").is_dir():
        _switch_on(_SYSCTL / "ipv6/conf" / interface / "disable_ipv6")


def _switch_on(setting: Path) -> None:
    """If it is not: where settings are read-only, those that are right are good enough."""
    if setting.read_text().strip() != "1":
        setting.write_text("1")


def _pyroute2() -> Any:
    """Imported late: it is an extra, and slow. It acts in the namespace of the calling thread."""
    import pyroute2  # type: ignore[import-untyped]

    return pyroute2


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Turn what the kernel refuses into an error that names the step."""
    try:
        yield
    except (OSError, _pyroute2().NetlinkError) as error:
        raise SandboxCreationError(
            f"The sandbox could not be given a network ({name}): {error}", step=name
        ) from error


@contextlib.contextmanager
def namespace_of(process: Mapping[str, Any]) -> Iterator[int]:
    """A descriptor of the network namespace of a process, which must not be ours. If the process
    has ended, its number may be another's by now: that is refused."""
    with step("network namespace"), pidfd_of(process) as pidfd:
        if pidfd is None:
            raise ProcessLookupError(errno.ESRCH, "the sandbox has ended")
        namespace = os.open(f"/proc/{process['pid']}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        if has_ended(pidfd):
            os.close(namespace)
            raise ProcessLookupError(errno.ESRCH, "the sandbox has ended")
    try:
        with step("network namespace"):
            if os.path.samestat(os.fstat(namespace), os.stat("/proc/thread-self/ns/net")):
                raise OSError(errno.EINVAL, "the process has the host's network")
        yield namespace
    finally:
        os.close(namespace)


def _inside(namespace: int, action: Callable[[], None]) -> None:
    """Act in another network namespace, in a thread of its own that is not used again."""

    def enter_and_act() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(ctypes.c_int(namespace), ctypes.c_int(_CLONE_NEWNET)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "setns")
        action()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="network") as thread:
        thread.submit(enter_and_act).result()
