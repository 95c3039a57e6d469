"""The handful of kernel calls that Python has no name for, each with declared argument types.

Undeclared ctypes integers are cut to 32 bits, so every prototype is spelled out. All raise
OSError; none retries.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

ATTR_RDONLY = 0x1
ATTR_NOSUID = 0x2
ATTR_NODEV = 0x4
ATTR_NOEXEC = 0x8
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_CAPABILITY_VERSION_3 = 0x20080522
# mount_setattr has one number everywhere (it came after the numbers were unified).
_SYS_MOUNT_SETATTR = 442
_SYS_CLOSE_RANGE = 436
_INT = struct.Struct("i")
_SYS_PIDFD_SEND_SIGNAL, _SYS_PIDFD_OPEN = 424, 434
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine, -1)

_SIOCSIFFLAGS = 0x8914
_SIOCADDRT = 0x890B
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_RTF_UP_GATEWAY = 0x1 | 0x2
_RTF_UP_REJECT = 0x1 | 0x200
_IFF_UP_RUNNING = 0x1 | 0x40
_IFF_UP_LOOPBACK_RUNNING = 0x1 | 0x8 | 0x40

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
_libc.syscall.argtypes = (ctypes.c_long, *(ctypes.c_ulong,) * 6)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def in_memory(content: bytes) -> ctypes.c_char:
    """Put the bytes where the kernel finds them as long as the returned object lives."""
    # create_string_buffer would make a class for each length that was not used before.
    return ctypes.c_char.from_buffer(bytearray(content))


def _syscall(number: int, what: str, *arguments: int) -> int:
    padded = [a & 0xFFFFFFFFFFFFFFFF for a in arguments] + [0] * (6 - len(arguments))
    return _checked(int(_libc.syscall(number, *padded)), what)


# Python has the next four itself, since 3.9.


def pidfd_open(pid: int) -> int:
    return _syscall(_SYS_PIDFD_OPEN, f"pidfd_open({pid})", pid, 0)


def send_signal(pidfd: int, number: int) -> None:
    _syscall(_SYS_PIDFD_SEND_SIGNAL, f"pidfd_send_signal({number})", pidfd, number, 0, 0)


def send_fds(channel: socket.socket, message: Sequence[bytes], fds: Sequence[int]) -> None:
    packed = struct.pack(f"{len(fds)}i", *fds)
    channel.sendmsg(message, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])


def recv_fds(channel: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a packet and the descriptors that came with it, ``most`` at most. A program that is
    executed does not inherit them."""
    space = socket.CMSG_LEN(most * _INT.size)
    message, control, _, _ = channel.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(data) // _INT.size}i", data[: len(data) & -_INT.size])
    return message, fds


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() or None,
            flags,
            data.encode() or None,
        ),
        target,
    )


def bind(source: str, target: str, attributes: int = 0) -> None:
    """Show ``source`` (with what is mounted below it) at ``target`` too."""
    mount(source, target, "", MS_BIND | MS_REC)
    if attributes:
        set_attributes(target, attributes)


def set_attributes(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Add mount attributes. Unlike a remount this never clears one, and reaches submounts."""
    path = in_memory(os.fsencode(target) + b"\0")
    attr = in_memory(struct.pack("=QQQQ", attributes, 0, 0, 0))
    _syscall(
        _SYS_MOUNT_SETATTR,
        target,
        _AT_FDCWD,
        ctypes.addressof(path),
        _AT_RECURSIVE if recursive else 0,
        ctypes.addressof(attr),
        32,
    )


def move(source: str, target: str) -> None:
    """Take a mount away from ``source`` and show it at ``target``."""
    mount(source, target, "", MS_MOVE)


def umount(target: str, flags: int = MNT_DETACH) -> None:
    _checked(_libc.umount2(os.fsencode(target), flags), target)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), f"setns({kind:#x})")


def pivot_root(new_root: str, put_old: str) -> None:
    new, old = (in_memory(os.fsencode(p) + b"\0") for p in (new_root, put_old))
    _syscall(_SYS_PIVOT_ROOT, new_root, ctypes.addressof(new), ctypes.addressof(old))


def prctl(option: int, argument: int = 0) -> int:
    return _checked(_libc.prctl(option, argument, 0, 0, 0), f"prctl({option})")


def close_from(first: int) -> None:
    """Close every descriptor from ``first`` on."""
    _syscall(_SYS_CLOSE_RANGE, "close_range", first, 0xFFFFFFFF, 0)


def capset(inheritable: int, permitted: int, effective: int) -> None:
    """Set this thread's three capability sets, given as 64-bit masks."""
    head = in_memory(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    words = []
    for shift in (0, 32):
        words += [(s >> shift) & 0xFFFFFFFF for s in (effective, permitted, inheritable)]
    data = in_memory(struct.pack("=6I", *words))
    _syscall(_SYS_CAPSET, "capset", ctypes.addressof(head), ctypes.addressof(data))


def permitted_capabilities() -> int:
    fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.read(fd, 8192)
    finally:
        os.close(fd)
    return int(status.partition(b"\nCapPrm:")[2].split(b"\n", 1)[0], 16)


def drop_all_capabilities() -> None:
    """Drop them from all five sets."""
    limit_capabilities(0)


def limit_capabilities(kept: int) -> None:
    """Keep those of a mask, which are permitted. The bounding set comes first: dropping from
    it needs a capability."""
    capability = 0
    while True:
        try:
            if not kept >> capability & 1:
                prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL and capability:
                break  # past the last capability this kernel knows
            raise
        capability += 1
    _checked(
        _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clear ambient capabilities"
    )
    capset(0, kept, kept)


def configure_interface(name: str, address: str, netmask: str, gateway: str) -> None:
    """An address, and a way out, for an interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
            fcntl.ioctl(probe.fileno(), request, struct.pack("16s", name.encode()) + _inet(value))
        up = struct.pack("16sh14x", name.encode(), _IFF_UP_RUNNING)
        fcntl.ioctl(probe.fileno(), _SIOCSIFFLAGS, up)
        with contextlib.suppress(FileExistsError):  # the image has done it itself
            _add_route(probe, "0.0.0.0/0", gateway, _RTF_UP_GATEWAY)


def refuse_routes(places: list[str]) -> None:
    """Have the kernel refuse whatever is sent there from this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for place in places:
            with contextlib.suppress(FileExistsError):
                _add_route(probe, place, "0.0.0.0", _RTF_UP_REJECT)  # noqa: S104  no gateway


def _add_route(probe: socket.socket, place: str, gateway: str, flags: int) -> None:
    address, _, bits = place.partition("/")
    mask = (0xFFFFFFFF << (32 - int(bits or 32))) & 0xFFFFFFFF
    netmask = socket.inet_ntoa(struct.pack(">I", mask))
    # What remains unnamed: padding, metric, device, mtu, window, round trip time.
    fields = (0, _inet(address), _inet(gateway), _inet(netmask), flags, *(0,) * 8)
    fcntl.ioctl(probe.fileno(), _SIOCADDRT, struct.pack("L16s16s16sHhLPhPLLH", *fields))


def _inet(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", _IFF_UP_LOOPBACK_RUNNING)
        fcntl.ioctl(probe.fileno(), _SIOCSIFFLAGS, request)
