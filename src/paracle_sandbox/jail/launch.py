"""The program that makes native sandboxes. Begin to read here.

PROCESSES, and what each may do

    owner ........ the caller's Python process. It has the caller's rights, and starts the launcher:
      │            ``python3 -I -S -E -c ...`` with a locale and no other environment.
      └ launcher   The owner's user. It makes a pid namespace (as an ordinary user a user namespace
         │         first), forks the spawner, and waits. It imports next to nothing.
         └ spawner Root, or root of that user namespace. PID 1 of the pid namespace. It has all
            │      capabilities, and is in a mount namespace and a root file system of its own:
            │      read-only, without the host's files. It makes and removes cgroups, subvolumes
            │      and records, and answers the owner. It runs no code of a sandbox or a template,
            │      and imports of what runs in one only how to fork and the frames' format.
            └ zygote  The same user with ten capabilities, and as root with an empty network
               │      namespace. It is forked first, imports the guest, gets the spawner's root
               │      when that is made, gives up its rights, imports the modules of the template,
               │      and forks. It gets no secret, because its memory is part of every later
               │      sandbox, and no descriptor but those that children need.
               └ child   PID 1 of a pid namespace of its own. It makes its other namespaces and its
                         mounts, takes a uid that no other sandbox has, drops all capabilities and
                         installs the filters (`confine`, step by step). Only then it is the guest
                         (`guest.main`), which starts untrusted programs as its children.

SOCKETS between them (all made by socketpair; no process has a path to another one)

    owner - spawner    "control": packets of JSON. The owner sends options once, then requests with
                       a number; each answer repeats the number. A descriptor of the owner's process
                       comes with the options, and that of a sandbox's channel with an answer.
    spawner - zygote   a word and its details, with descriptors. The zygote answers each in order.
    spawner - child    "status": the child's own order, then "go"; back come "ok" or the step that
                       failed. Both ends are closed when the child is confined.
    owner - guest      "channel": the frames of `channel.frames`. The spawner makes it, gives one
                       end to the owner, and keeps neither.

WAITING

    The launcher waits for the end of the spawner, and for nothing else. The spawner waits in one
    place, its selector, for the owner's control socket, the owner's process, the zygote's process,
    and the status and process of each child. It waits for the zygote only while that forks, or
    imports a module; if the zygote dies, that wait ends with an error. The child waits for "go",
    which comes when its groups are there. No process waits for a guest or a program.

IN WHICH ORDER THINGS DIE

    A child has the zygote's death as its own (a parent-death signal), and the zygote, every child
    and every program are in the spawner's pid namespace: when the spawner dies, the kernel kills
    all of them before the spawner counts as dead. The spawner dies when the launcher does (a
    parent-death signal), and ends by itself when the control socket or the owner's process does:
    then it kills the children, removes what they had, and its own files last. A sandbox alone dies
    by SIGKILL to its PID 1, whose pid namespace the kernel empties; then the spawner removes its
    cgroup, its subvolume and its record, in this order, so that a record is there as long as
    anything else is. Whatever a spawner that was killed left behind, the next one sweeps by the
    records.

The launcher forks before it imports the rest, because the kernel keeps account of memory that was
there before a fork in each process that comes of it, down to the last program.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from . import kernel

if TYPE_CHECKING:
    from .zygote_client import Zygote

_MAX_MESSAGE = 1 << 16
_LAST_PIDS = 16


def main(control: socket.socket, package_path: str) -> NoReturn:
    step = "start"
    try:
        os.chdir("/")
        # What the owner's parents left open is no business of ours.
        kernel.close_from(control.fileno() + 1)
        rootless = os.geteuid() != 0
        step = "user namespace"
        if rootless:
            _become_root_of_a_user_namespace()
        step = "pid namespace"
        kernel.unshare(kernel.CLONE_NEWPID)
        spawner = os.fork()
    except OSError as error:
        _give_up(control, step, error)
    if spawner == 0:
        _become_spawner(control, package_path, rootless=rootless)
    control.close()
    os._exit(_wait(spawner))


def _become_spawner(control: socket.socket, package_path: str, *, rootless: bool) -> NoReturn:
    """Get ready, hear what for, and do it."""
    step = "start"
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _prepare_process()
        step = "spawner"
        # The zygote shares it, and so gets its root.
        kernel.unshare(kernel.CLONE_NEWNS)
        zygote = _fork_zygote(control, package_path)
        step = "start"
        _import_spawner(package_path)
        packet, fds = kernel.recv_fds(control, _MAX_MESSAGE, 1)
    except OSError as error:
        _give_up(control, step, error)
    if not packet:
        os._exit(0)  # started ahead of a need that did not come
    try:
        options = {**json.loads(packet), "rootless": rootless, "owner_fd": fds[0]}
        _serve(control, options, zygote)
    except OSError as error:
        _report(control, "spawner", error)
        os._exit(1)
    os._exit(0)


def _prepare_process() -> None:
    """Set limits and signals, which the zygote inherits. (Guests change them for themselves.)"""
    # A sandbox costs a descriptor or two; what it may open itself is limited later.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    # A child that has ended is gone: neither we nor the zygote have to wake up for it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _skip_small_pids()


def _skip_small_pids() -> None:
    """Give the next process, the zygote, a pid that no program of a sandbox comes to have.

    Libraries take a pid that has changed for the sign of a fork, and then make new random
    numbers, OpenSSL and its many copies among them. In a namespace of its own a program could
    have the very pid that the zygote has in its."""
    with contextlib.suppress(OSError):  # read-only in containers
        with open("/proc/sys/kernel/pid_max", "rb", buffering=0) as file:
            most = int(file.read())
        with open("/proc/sys/kernel/ns_last_pid", "wb", buffering=0) as last:
            last.write(b"%d" % (most - _LAST_PIDS))


def _fork_zygote(control: socket.socket, package_path: str) -> Zygote:
    """Early, so that it imports what sandboxes are made of while we import the rest."""
    from .zygote_client import Zygote

    def become(its_end: socket.socket) -> None:
        from .zygote import serve

        serve(its_end, package_path)

    return Zygote(become, (control.fileno(),))


def _import_spawner(package_path: str) -> None:
    """While our files can still be seen, and before any request waits."""
    from . import resources, spawner  # noqa: F401

    gc.freeze()
    gc.enable()
    sys.path.remove(package_path)


def _serve(control: socket.socket, options: dict[str, Any], zygote: Zygote) -> None:
    from .resources import Resources
    from .spawner import Spawner

    zygote.end_with(options["owner_fd"])
    zygote.wait_until_ready()
    resources = Resources(options)
    rights = resources.own_network, resources.capabilities
    try:
        note = zygote.begin(resources.place, options, *rights)
    except OSError:
        resources.close()
        raise
    posture = {**resources.posture(), "missing_modules": zygote.missing}
    posture.update(landlock=not note, landlock_note=note)
    # An owner that is gone already is noticed by the loop, which then cleans up.
    with contextlib.suppress(OSError):
        control.send(json.dumps({"event": "ready", **posture}).encode())
    Spawner(control, resources, zygote, options).run()


def _become_root_of_a_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"1000 {uid} 1"),
        ("gid_map", f"1000 {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _wait(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _give_up(control: socket.socket, step: str, error: OSError) -> NoReturn:
    """Before the owner was heard: with words of its own unread, it would not be given ours."""
    with contextlib.suppress(OSError):
        control.recv(_MAX_MESSAGE)
    _report(control, step, error)
    os._exit(1)


def _report(control: socket.socket, step: str, error: OSError) -> None:
    packet = {"event": "failed", "step": step, "message": str(error), "errno": error.errno or 0}
    with contextlib.suppress(OSError):
        control.send(json.dumps(packet).encode())
