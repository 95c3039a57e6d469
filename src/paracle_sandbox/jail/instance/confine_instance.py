"""Confinement from inside: in a container or virtual machine that an engine has made.

An Incus instance is a whole system, and what the server starts in it is its root. So before the
guest arrives, that root leaves a porter behind (porter.py), makes itself a place like those of the
native backend, out of the files of the image, and gives up everything else: PID 1 of a pid
namespace, uid 1000, no capability, seccomp.

The instance ends with its guest, and the guest with its channel, whoever has died on the other
side. Each step has a name; one that fails is told on stderr, and no guest starts.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

from .. import kernel
from ..confine import bind_text, mount_dev, mount_proc, set_rlimits
from ..filters import seccomp
from ..root import READ_ONLY, make_dev
from ..shape import EXTRA_WRITABLE, UID_INSIDE, Identity, Shape, prepare_workspace
from ..steps import StepFailed, Steps

HOME = "/.paracle"
FAILED = "paracle-step"
_EMPTY = "/.empty"
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)
_WRITABLE = kernel.ATTR_NOSUID | kernel.ATTR_NODEV
_TMPFS = kernel.MS_NOSUID | kernel.MS_NODEV
_CPUS = "/sys/devices/system/cpu"
_USER = "paracle"


def confine(plan: dict[str, Any]) -> None:
    """Returns in a process that may be the guest. The porter was left behind before."""
    try:
        _furnish(plan)
        _give_up(plan)
    except StepFailed as failed:
        _tell(failed)
    kernel.close_from(3)


def _tell(failed: StepFailed) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"{FAILED} {failed}\n".encode())
    os._exit(1)


def _step(name: str) -> contextlib.AbstractContextManager[None]:
    return Steps({}, lambda _: None).step(name)


def _furnish(plan: dict[str, Any]) -> None:
    """The place, while we are still its root."""
    with _step("namespaces"):
        kernel.unshare(_NAMESPACES)
    with _step("loopback"):
        kernel.loopback_up()
    with _step("network"):
        if plan.get("address"):
            # Nobody has given it an address that could be filtered.
            for name in ("all", "default", "eth0"):
                _write(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "1")
            kernel.configure_interface("eth0", plan["address"], plan["netmask"], plan["gateway"])
            kernel.refuse_routes(plan["refused"])
    with _step("hostname"):
        socket.sethostname("sandbox")
    with _step("private mounts"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        os.makedirs(_EMPTY, 0o755, exist_ok=True)
    with _step("workspace"):
        _mount_workspace(plan)
    with _step("proc"):
        mount_proc()
    with _staging():
        with _step("users"):
            _write_etc(plan)
        with _step("devices"):
            make_dev(_EMPTY)
            _replace("/dev", _EMPTY + "/dev")
            mount_dev()
        with _step("sys"):
            _show_little_of_sys()
    with _step("read-only root"):
        kernel.set_attributes("/", READ_ONLY, recursive=False)


def _give_up(plan: dict[str, Any]) -> None:
    """Everything that root has."""
    with _step("rlimits"):
        set_rlimits()
        if plan.get("max_processes"):
            resource.setrlimit(resource.RLIMIT_NPROC, (plan["max_processes"],) * 2)
    with _step("identity"):
        keep = kernel.permitted_capabilities()
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(UID_INSIDE, UID_INSIDE, UID_INSIDE)
        os.setresuid(UID_INSIDE, UID_INSIDE, UID_INSIDE)
        kernel.capset(0, keep, keep)
    with _step("capabilities"):
        kernel.drop_all_capabilities()
    with _step("no_new_privs"):
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    with _step("working directory"):
        os.chdir(plan["working_dir"])
        if os.getcwd() != plan["working_dir"]:
            raise OSError(0, "a link leads elsewhere", plan["working_dir"])
    with _step("parent death"):
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with _step("seccomp"):
        seccomp.install(seccomp.program())
    with _step("dumpable"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _mount_workspace(plan: dict[str, Any]) -> None:
    """All that can be written is in one place with one limit: a disk of the instance, or memory."""
    size = plan["tmpfs_mb"]
    os.makedirs(HOME, 0o755, exist_ok=True)
    if size:
        kernel.mount(
            "tmpfs", HOME, "tmpfs", _TMPFS, f"mode=755,size={size}m,nr_inodes={size * 128}"
        )
    if not os.path.isdir(HOME + "/workspace"):
        identity = Identity(UID_INSIDE, UID_INSIDE, rootless=False)
        prepare_workspace(HOME, Shape(read_only=False), identity)
    places = {plan["working_dir"]: "workspace", "/tmp": "tmp"}
    if not plan["read_only"]:
        places |= {f"/{name}": name for name in EXTRA_WRITABLE if f"/{name}" != plan["working_dir"]}
    for target in sorted(places):
        os.makedirs(target, 0o755, exist_ok=True)
        kernel.bind(f"{HOME}/{places[target]}", target, _WRITABLE)
    kernel.umount(HOME)


@contextlib.contextmanager
def _staging() -> Iterator[None]:
    """A tmpfs to put things together in. What was bound out of it keeps it alive."""
    with _step("staging"):
        kernel.mount("tmpfs", _EMPTY, "tmpfs", _TMPFS, "mode=755,size=4m")
        for name in ("dev", "sys", "run", "etc"):
            os.mkdir(f"{_EMPTY}/{name}", 0o755)
    yield
    with _step("staging"):
        kernel.bind(_EMPTY + "/run", "/run", READ_ONLY)
        kernel.umount(_EMPTY)


def _replace(target: str, staged: str) -> None:
    """Unmount what is there, with all that is mounted below it."""
    with contextlib.suppress(OSError):  # nothing is, or the kernel keeps it: then it is covered
        kernel.umount(target)
    kernel.move(staged, target)


def _show_little_of_sys() -> None:
    """How many processors there are, and nothing else about the machine."""
    staged = _EMPTY + "/sys"
    kernel.mount("tmpfs", staged, "tmpfs", _TMPFS, "mode=755,size=64k")
    os.makedirs(_EMPTY + _CPUS, 0o755)
    if os.path.isdir(_CPUS):
        kernel.bind(_CPUS, _EMPTY + _CPUS, READ_ONLY)
    kernel.set_attributes(staged, kernel.ATTR_RDONLY, recursive=False)
    _replace("/sys", staged)


def _write_etc(plan: dict[str, Any]) -> None:
    """An image knows neither the user that programs are, nor that it has no network."""
    texts = {
        "passwd": _with_user("passwd", f"{_USER}:x:{UID_INSIDE}:{UID_INSIDE}:Paracle:/tmp:/bin/sh"),
        "group": _with_user("group", f"{_USER}:x:{UID_INSIDE}:"),
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
        "machine-id": "0" * 32 + "\n",
        "resolv.conf": plan["resolv_conf"],
    }
    for name, text in texts.items():
        target = f"/etc/{name}"
        if os.path.islink(target):
            os.unlink(target)  # into /run, mostly, which will be empty
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        bind_text(f"{_EMPTY}/etc/{name}", text, target)


def _write(path: str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError), open(path, "w", encoding="ascii") as file:
        file.write(text)


def _with_user(name: str, line: str) -> str:
    """Copy the image's own file, without another user or group of this name or number."""
    try:
        with open(f"/etc/{name}", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        lines = []
    fields = [one.split(":") for one in lines]
    others = [
        ":".join(parts)
        for parts in fields
        if len(parts) > 2 and parts[0] != _USER and parts[2] != str(UID_INSIDE)
    ]
    return "\n".join([*others, line, ""])
