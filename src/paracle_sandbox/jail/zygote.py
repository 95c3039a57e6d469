"""The zygote: the process that every sandbox is a fork of.

    spawner ── zygote ── sandbox, sandbox, ...

A fork shares the memory of its parent until one of them writes to it, page by page. The spawner
writes all the time: each sandbox would be left with its own copy of what the spawner had, and the
spawner would copy its pages again after each fork. The zygote does nothing but import what programs
may want, and fork. Sandboxes die with it, and it dies with the spawner, which is PID 1.

Messages are a word and what goes with it, one a packet. What is only for a child is sent over the
child's own socket: what the zygote hears is in the memory of every later sandbox.

It is forked before the spawner has a root for sandboxes, and imports our own files while they can
be seen. Then it waits for `Zygote.begin` (`zygote_client`).

What a template brings is imported here, in a process that has to fork root's children and so cannot
be an ordinary one. Before that it gives up what it can: the host's network, and all capabilities
that no step of a child takes. Lines of .pth files, which Python executes when it starts, are left
to programs. What remains is CAP_SYS_ADMIN: modules that a template imports ahead of need are
trusted.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import signal
import site
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from .. import guest
from ..guest.kernel import fork
from ..guest.main import file_operations
from ..guest.python.interpreter_state import add_packages, forget_guest, imported_names, reset_hooks
from ..guest.python.program import make_ready
from . import kernel
from .clone import fork_into
from .confine import Filters
from .filters import landlock, seccomp
from .first_process import Start, run_child
from .limits.cgroups import Cgroups
from .limits.sandbox_resources import Place
from .limits.volume import Volume
from .zygote_client import MAX_MESSAGE, READY

_MOST_DESCRIPTORS = 16
# What steps of `confine`, and of entering a place, take.
_NEEDED_CAPABILITIES = sum(
    1 << number
    for number in (
        0,  # CAP_CHOWN: of the workspace
        1,  # CAP_DAC_OVERRIDE: control groups of another's making
        3,  # CAP_FOWNER
        5,  # CAP_KILL: a child that cannot be watched
        6,  # CAP_SETGID
        7,  # CAP_SETUID
        8,  # CAP_SETPCAP: the bounding set
        12,  # CAP_NET_ADMIN: the loopback
        21,  # CAP_SYS_ADMIN: namespaces, mounts, subvolumes
        24,  # CAP_SYS_RESOURCE
    )
)

if TYPE_CHECKING:  # before Python 3.9 this cannot be evaluated
    _Answer = tuple[bytes, list[int]]


def serve(control: socket.socket, package_path: str) -> NoReturn:
    """Be the zygote."""
    try:
        _import_guest(package_path)
        own_pidns = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        control.send(READY)
        packet, fds = kernel.recv_fds(control, MAX_MESSAGE, _MOST_DESCRIPTORS)
        if not packet:
            os._exit(0)
        start = _begin(control, own_pidns, json.loads(packet.partition(b" ")[2]), fds)
        operations = {b"import": _import, b"fork": _fork}
        while True:
            packet, fds = kernel.recv_fds(control, MAX_MESSAGE, 3)
            if not packet:
                break
            word, _, details = packet.partition(b" ")
            answer, given = operations[word](details, fds, start)
            kernel.send_fds(control, [answer], given)
            for fd in given:
                os.close(fd)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # _exit would keep it to itself
        raise
    finally:
        os._exit(1)
    raise AssertionError("unreachable")


def _import_guest(package_path: str) -> None:
    """All of it, while our files can be seen."""
    _import_package(guest.__name__, guest.__path__[0])
    file_operations()
    # What is imported stays, in this process and in all that come of it: it is not looked at again.
    gc.freeze()
    gc.enable()
    # What is ours was found here; what a sandbox imports must not be.
    if package_path in sys.path:
        sys.path.remove(package_path)


def _import_package(package: str, folder: str) -> None:
    for entry in sorted(os.listdir(folder)):
        name, dot, ending = entry.partition(".")
        if dot and ending == "py" and name != "__init__":
            importlib.import_module(f"{package}.{name}")
        elif not dot and name != "__pycache__":
            _import_package(f"{package}.{name}", os.path.join(folder, name))


def _begin(
    control: socket.socket, own_pidns: int, details: dict[str, Any], fds: list[int]
) -> Start:
    """The root is the one that sandboxes have: take what children need, and give up the rest."""
    try:
        _require_root(details["root"])
        start, note = _take(own_pidns, details, fds)
        _give_up_privileges(start)
        add_packages(site.getsitepackages([sys.base_prefix, sys.base_exec_prefix]))
        make_ready(start.env, start.python)
        forget_guest()
    except OSError as error:
        control.send(json.dumps({"errno": error.errno or 0, "message": str(error)}).encode())
        os._exit(1)
    control.send(json.dumps({"landlock_note": note}).encode())
    return start


def _require_root(expected: list[int]) -> None:
    """The spawner has changed the root of all processes in this mount namespace: be sure of it."""
    os.chdir("/")
    found = os.stat("/")
    if [found.st_dev, found.st_ino] != expected:
        raise PermissionError(errno.EPERM, "the zygote is not in the root of sandboxes")


def _take(own_pidns: int, details: dict[str, Any], fds: list[int]) -> tuple[Start, str]:
    """The other end is `Zygote.begin`."""
    expected = details["cgroups"] + details["volume"] + details["network"]
    if len(fds) != expected:
        raise OSError(errno.EMFILE, "the spawner has too many open files")
    groups, rest = fds[: details["cgroups"]], fds[details["cgroups"] :]
    place = Place(
        Cgroups.adopt(details["cgroup_version"], groups) if groups else None,
        Volume.adopt(rest.pop(0)) if details["volume"] else None,
        details["is_born_in_group"],
    )
    no_landlock = landlock.unavailable()
    start = Start(
        own_pidns,
        place,
        Filters(seccomp.program(), no_landlock is None),
        details["failpoints"],
        details["env"],
        details["python"],
        rest.pop(0) if details["network"] else -1,
        details["capabilities"],
    )
    return start, no_landlock or ""


def _give_up_privileges(start: Start) -> None:
    """Give up what no child needs. An ordinary user has nothing to give up."""
    if start.own_network < 0:
        return
    kernel.unshare(kernel.CLONE_NEWNET)
    kernel.limit_capabilities(start.capabilities & _NEEDED_CAPABILITIES)


def _import(modules: bytes, _fds: list[int], _start: Start) -> _Answer:
    missing = [name for name in json.loads(modules) if not _try_import(name)]
    reset_hooks()
    imported_names()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as it was: see `launch`
    # Collected objects would be written to in every child, and their pages copied.
    gc.collect()
    gc.freeze()
    return json.dumps(missing).encode(), []


def _try_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a package may raise anything; the sandbox works without it
        return False
    return True


def _fork(count: bytes, fds: list[int], start: Start) -> _Answer:
    pid = 0
    try:
        if len(fds) != int(count):  # the kernel could not give us all that came with the message
            raise OSError(errno.EMFILE, "the spawner has too many open files")
        channel, status, *group = fds
        if not group:
            kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = fork_into(kernel.CLONE_NEWPID, group[0]) if group else fork()
            if pid == 0:
                run_child(start, channel, status)
        finally:
            if not group:  # Where later forks go; without this the next unshare would be refused.
                kernel.setns(start.own_pidns, kernel.CLONE_NEWPID)
        return b"%d" % pid, [kernel.pidfd_open(pid)]
    except OSError as error:
        # A child that cannot be watched must not live. If it has ended, its pid may be reused.
        if pid and not isinstance(error, ProcessLookupError):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{error.errno or 0} {error}".encode(errors="replace"), []
    finally:
        for fd in fds:
            os.close(fd)
