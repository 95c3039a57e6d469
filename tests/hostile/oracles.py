"""Witnesses on the host. The claims of a hostile program about itself are evidence, never proof."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paracle_sandbox.backends.machine import process_isolation

NAMESPACES = process_isolation.NAMESPACES


class Canary:
    """A host file that no program inside may read, change or even touch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secret = f"canary-{secrets.token_hex(16)}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.secret)
        path.chmod(0o666)  # a mode bit must not be its protection
        self._before = fingerprint(path)

    def assert_intact(self) -> None:
        assert fingerprint(self.path) == self._before, f"{self.path} was touched"


class CanaryTree:
    """A host directory with a file below it.

    Its names and all fingerprints must stay as they are.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.canary = Canary(root / "inner" / "f")
        root.chmod(0o777)
        (root / "inner").chmod(0o777)
        self._before = tree_fingerprint(root)

    @property
    def secret(self) -> str:
        return self.canary.secret

    def assert_intact(self) -> None:
        assert tree_fingerprint(self.root) == self._before, f"{self.root} was touched"


def fingerprint(path: Path) -> tuple[object, ...]:
    """Return content, inode, owner, mode, links and times of change: everything but the time of
    reading."""
    status = path.lstat()
    content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
    return (
        hashlib.sha256(content).hexdigest(), status.st_ino, status.st_mode, status.st_uid,
        status.st_gid, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns,
    )  # fmt: skip


def tree_fingerprint(root: Path) -> dict[str, tuple[object, ...]]:
    return {str(path.relative_to(root)): fingerprint(path) for path in [root, *root.rglob("*")]}


def hash_files(paths: list[Path]) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


class Listener:
    """A host service that counts the clients that reach it, by TCP or UDP on an address, or a unix
    socket."""

    def __init__(self, family: int, kind: int, address: object) -> None:
        self.hits = 0
        self._socket = socket.socket(family, kind)
        self._socket.bind(address)  # type: ignore[arg-type]
        if kind != socket.SOCK_DGRAM:
            self._socket.listen(64)
        self._socket.settimeout(0.05)
        self.address = self._socket.getsockname()
        self._kind = kind
        self._ends = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends:
            try:
                if self._kind == socket.SOCK_DGRAM:
                    self._socket.recvfrom(2048)
                else:
                    self._socket.accept()[0].close()
                self.hits += 1
            except TimeoutError:
                continue
            except OSError:
                return

    def close(self) -> None:
        # Data that is still in the queue counts as well.
        time.sleep(0.1)
        self._ends = True
        self._thread.join()
        self._socket.close()


@contextmanager
def listening(*wanted: tuple[int, int, object]) -> Iterator[list[Listener]]:
    listeners = [Listener(*each) for each in wanted]
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def host_addresses() -> list[str]:
    """Return every IPv4 address of this machine, the loopback first."""
    import fcntl
    import struct

    found = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return list(dict.fromkeys(found))


def namespaces_of(pid: int) -> dict[str, str]:
    """Return the namespaces of a process, as lsns shows them."""
    return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES}


def processes_of_uid(uid: int, user_namespace: str | None = None) -> list[int]:
    """Return the processes of a uid on the whole machine, or in one user namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid != uid and uid not in _uids(int(name)):
                    continue
                if user_namespace in (None, os.readlink(f"/proc/{name}/ns/user")):
                    found.append(int(name))
            except OSError:
                continue
    return found


def _uids(pid: int) -> tuple[int, ...]:
    return process_isolation.read_posture(pid).uids


def descriptors(pid: int) -> dict[int, str]:
    """Return the target of each descriptor of a process; nothing if it has ended."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for name in names:
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def mountinfo(pid: int | str = "self") -> list[str]:
    return Path(f"/proc/{pid}/mountinfo").read_text().splitlines()


# These come and go with the tests on engines, which run beside these: see scripts/run_tests.sh.
_ENGINES = re.escape(os.environ.get("PARACLE_TEST_CACHE") or "/paracle-sandbox-tests/")
_LANES = re.escape(os.environ.get("PARACLE_TEST_LANES") or "/paracle-sandbox-tests/")
_OWN_LANE = re.escape(os.environ.get("PARACLE_TEST_LANE") or "others")
_MOUNTS_OF_ENGINES = re.compile(
    f"{_ENGINES}|{_LANES}/(?!{_OWN_LANE}/)|/paracle-sandbox-tests/|/store-[0-9]+$|^/run/netns"
)
_BRIDGES_OF_ENGINES = re.compile("br-|docker|podman|pcl|prcl|incus|paracletest")


def host_mounts() -> list[str]:
    """Return the mounts of this process without those of engines."""
    return [line for line in mountinfo() if not _MOUNTS_OF_ENGINES.search(line.split()[4])]


def host_routes() -> list[str]:
    routes = _lines("/proc/net/route")
    return [route for route in routes if not _BRIDGES_OF_ENGINES.match(route)]


def host_state() -> dict[str, object]:
    """Return what a sandbox could break on the machine and no other program changes meanwhile."""
    sysctls = ("kernel/core_pattern", "kernel/hostname", "kernel/domainname", "kernel/sysrq",
               "kernel/modprobe", "kernel/panic", "vm/overcommit_memory", "fs/suid_dumpable",
               "kernel/randomize_va_space", "net/ipv4/ip_forward")  # fmt: skip
    return {
        "mounts": host_mounts(),
        "modules": {line.split()[0] for line in _lines("/proc/modules")},
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "hostname": os.uname().nodename,
        "swaps": _text("/proc/swaps"),
        "routes": [
            line for line in _lines("/proc/net/route") if not _BRIDGES_OF_ENGINES.match(line)
        ],
        "sysvipc": [_lines(f"/proc/sysvipc/{kind}") for kind in ("msg", "sem")],
        **{name: _text(f"/proc/sys/{name}") for name in sysctls},
    }


def keys_named(word: str) -> list[str]:
    """Return the keys of the host whose description contains the word."""
    return [line for line in _lines("/proc/keys") if word in line]


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def _lines(path: str) -> list[str]:
    return _text(path).splitlines()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
