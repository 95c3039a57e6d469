"""Confine this process: the steps that a forked child takes before it becomes a guest, in order.

    spawner (root, or root of a user namespace)
      └─ child: PID 1 of a new pid namespace, already in its own cgroup
           namespaces → mounts → identity → capabilities → no_new_privs → landlock → seccomp

Each step has a name; a step that fails ends the child with that name, and no user code has
run. Mounts come before the user namespace, so that every namespace of the sandbox belongs to
the namespace above it: even a full set of capabilities inside would have no power over them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple

from . import kernel
from .filters import landlock, seccomp
from .root import BOOT_ID, EMPTY, OTHER_PROC, READ_ONLY, VOLUME, enter
from .shape import EXTRA_WRITABLE, UID_INSIDE, Identity, Shape, prepare_workspace
from .steps import Steps

_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)
_WRITABLE = kernel.ATTR_NOSUID | kernel.ATTR_NODEV
# What /proc shows of the machine rather than of the sandbox, as far as an ordinary user may read
# it: the rest (kmsg, slabinfo, iomem ...) is root's, and root is not inside. Each mask costs every
# sandbox a mount.
_PROC_HIDDEN_FILES = ("kcore", "kallsyms", "keys", "key-users", "timer_list", "sched_debug",
                      "config.gz", "cmdline", "sysrq-trigger", "partitions", "diskstats",
                      "latency_stats", "interrupts", "softirqs", "schedstat",
                      "locks")  # fmt: skip
# A program that writes to a file of "pressure" is given a timer and memory of the kernel, which
# is charged to no sandbox.
_PROC_HIDDEN_DIRS = ("acpi", "scsi", "asound", "bus", "irq", "fs", "pressure")
_PROC_READ_ONLY = ("sys",)
# The kernel has some 3000 (kernel.pty) for all containers of a machine together.
_MAX_TERMINALS = 64

_RLIMITS = {
    # Not 0, which does not keep the kernel from starting a core_pattern program on the host.
    resource.RLIMIT_CORE: (1, 1),
    resource.RLIMIT_NOFILE: (1024, 4096),
    resource.RLIMIT_MEMLOCK: (64 << 10, 64 << 10),
    resource.RLIMIT_MSGQUEUE: (0, 0),
    resource.RLIMIT_NICE: (0, 0),
    resource.RLIMIT_RTPRIO: (0, 0),
}


# Without root, sandboxes are the user who runs them, and what the kernel has for that user is for
# all of them together. Of inotify's 128 instances each gets a share.
_USERS_SHARE = {"max_inotify_instances": 16, "max_inotify_watches": 8192}
# A process may send descriptors over a socket while its user has fewer in flight than the process
# may have open, which is mostly 1024. A process that has 768 leaves room for that of the user's
# other programs: it may exceed its limit by one message, of 253.
_USERS_DESCRIPTORS = (768, 768)


class Filters(NamedTuple):
    """The layers that the kernel either has or not, settled once for all children."""

    seccomp: bytes
    landlock: bool


def confine(
    slot: str,
    shape: Shape,
    identity: Identity,
    steps: Steps,
    filters: Filters,
    show_disk: Callable[[int], None],
) -> None:
    """Everything, in order. Returns in a process that may run untrusted code.

    ``show_disk`` is given a descriptor of the workspace's own tmpfs, if it has one, so that the
    spawner can see how full it is."""
    with steps.step("namespaces"):
        network = kernel.CLONE_NEWNET if shape.network != "host" else 0
        kernel.unshare(_NAMESPACES | network)
    with steps.step("loopback"):
        if shape.network != "host":
            kernel.loopback_up()
    with steps.step("hostname"):
        socket.sethostname("sandbox")
    with steps.step("private mounts"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with steps.step("workspace"):
        _mount_workspace(slot, shape, identity, show_disk)
    with steps.step("devices"):
        mount_dev()
    namespace_limits = -1
    with steps.step("proc"):
        mount_proc()
        if identity.rootless:
            # By way of another /proc, because in the sandbox's own it is read-only from now on.
            namespace_limits = os.open(OTHER_PROC + "/sys/user", os.O_PATH | os.O_CLOEXEC)
            kernel.umount(OTHER_PROC)
    with steps.step("rlimits"):
        set_rlimits()
        if identity.rootless:
            _lower_limit(resource.RLIMIT_NOFILE, *_USERS_DESCRIPTORS)
    with steps.step("identity"):
        _become(identity)
    with steps.step("limits of the user"):
        if identity.rootless:
            _limit_user_namespace(namespace_limits)
            os.close(namespace_limits)
    with steps.step("capabilities"):
        kernel.drop_all_capabilities()
    with steps.step("no_new_privs"):
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    with steps.step("working directory"):
        _enter_working_dir(shape)
    with steps.step("parent death"):
        # After the change of identity, which would have cleared it.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with steps.step("landlock"):
        if filters.landlock:
            landlock.restrict(["/"], _writable_places(shape))
    with steps.step("seccomp"):
        seccomp.install(filters.seccomp)
    with steps.step("dumpable"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _mount_workspace(
    slot: str, shape: Shape, identity: Identity, show_disk: Callable[[int], None]
) -> None:
    """/workspace and /tmp, both in one place with one limit, and nothing else of that place."""
    first = "/" + shape.working_dir.strip("/").split("/")[0]
    if not os.path.isdir(first):
        _take_own_root(first)
    if shape.tmpfs_mb:
        options = f"mode=755,size={shape.tmpfs_mb}m,nr_inodes={shape.tmpfs_mb * 128}"
        kernel.mount("tmpfs", VOLUME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        home = VOLUME
        prepare_workspace(home, shape, identity)
        disk = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        show_disk(disk)
        os.close(disk)
    else:
        home = f"{VOLUME}/{slot}"
    extra = () if shape.read_only else EXTRA_WRITABLE
    for name in extra:
        kernel.bind(f"{home}/{name}", f"/{name}", _WRITABLE)
    target = shape.working_dir
    if first[1:] in extra:
        os.makedirs(target, 0o755, exist_ok=True)
    elif target != first:
        _make_mountpoint(target, first)
    kernel.bind(home + "/workspace", target, _WRITABLE)
    kernel.bind(home + "/tmp", "/tmp", _WRITABLE)
    if shape.resolv_conf:
        bind_text(home + "/resolv.conf", shape.resolv_conf, "/etc/resolv.conf")
    kernel.umount(VOLUME)


def _make_mountpoint(path: str, first: str) -> None:
    """A working directory elsewhere: on a tmpfs over its first component, in this sandbox only."""
    kernel.mount("tmpfs", first, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k")
    os.makedirs(path, 0o755)
    kernel.set_attributes(first, kernel.ATTR_RDONLY, recursive=False)


def _take_own_root(extra: str) -> None:
    """A root that has one directory more. Made in the shared one it would be seen by others."""
    entries = list(os.scandir("/"))
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", EMPTY, "tmpfs", flags, "mode=755,size=256k")
    for entry in entries:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), EMPTY + entry.path)
            continue
        os.mkdir(EMPTY + entry.path, 0o755)
        if entry.path != EMPTY:
            kernel.mount(entry.path, EMPTY + entry.path, "", kernel.MS_BIND | kernel.MS_REC)
    os.mkdir(EMPTY + extra, 0o755)
    enter(EMPTY)


def bind_text(path: str, text: str, target: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    kernel.bind(path, target, READ_ONLY)


def mount_dev() -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
    options = f"newinstance,ptmxmode=0666,mode=620,max={_MAX_TERMINALS}"
    kernel.mount("devpts", "/dev/pts", "devpts", flags, options)
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", flags | kernel.MS_NODEV, "mode=1777,size=256m")


def mount_proc() -> None:
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for name in _PROC_HIDDEN_FILES:
        if _is_there("/proc/" + name):
            kernel.mount("/dev/null", "/proc/" + name, "", kernel.MS_BIND)
    for name in _PROC_HIDDEN_DIRS:
        if _is_there("/proc/" + name):
            kernel.bind(EMPTY, "/proc/" + name)
    for name in _PROC_READ_ONLY:
        kernel.bind("/proc/" + name, "/proc/" + name, READ_ONLY | kernel.ATTR_NOEXEC)
    if _is_there(BOOT_ID):  # that of the host would tell its sandboxes from those of another
        kernel.bind(BOOT_ID, "/proc/sys/kernel/random/boot_id", READ_ONLY | kernel.ATTR_NOEXEC)


def _is_there(path: str) -> bool:
    """Raise where it cannot be looked at: os.path would say that it is missing, and it would go
    without its mask."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def set_rlimits() -> None:
    for kind, (soft, hard) in _RLIMITS.items():
        _lower_limit(kind, soft, hard)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    """One that is lower already stays: not everybody may raise it."""
    _, had = resource.getrlimit(kind)
    if had != resource.RLIM_INFINITY:
        hard = min(hard, had)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _become(identity: Identity) -> None:
    """Take the sandbox's own ids, then a user namespace in which they are uid and gid 1000."""
    if not identity.rootless:
        keep = kernel.permitted_capabilities()
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
        kernel.capset(0, keep, keep)
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    # The change of credentials made our /proc files root's; the maps are written by us.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{UID_INSIDE} {uid} 1")
    _write("/proc/self/gid_map", f"{UID_INSIDE} {gid} 1")
    if (os.getresuid(), os.getresgid()) != ((UID_INSIDE,) * 3, (UID_INSIDE,) * 3):
        raise PermissionError(1, f"ids are {os.getresuid()}, {os.getresgid()}", "identity")


def _limit_user_namespace(folder: int) -> None:
    """While we are root of it. Where it is refused, as a container's security policy may, programs
    can use up what the user has."""
    for name, most in _USERS_SHARE.items():
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.write(fd, b"%d" % most)
            finally:
                os.close(fd)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _enter_working_dir(shape: Shape) -> None:
    os.chdir(shape.working_dir)
    if os.getcwd() != shape.working_dir:
        raise OSError(0, "the working directory is not inside the root", os.getcwd())


def _writable_places(shape: Shape) -> list[str]:
    places = [shape.working_dir, "/tmp", "/dev", "/proc"]
    if not shape.read_only:
        places += [f"/{name}" for name in EXTRA_WRITABLE]
    return places
