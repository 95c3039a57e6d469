"""How a spawner comes up: the program that the owner starts, and its two processes.

The owner runs ``python3 -I -S -E -c ...`` with a locale and no other environment, and without
collection of garbage, of which imports make next to none. The started process (the launcher) makes
the namespaces that need a fork to take effect, forks the spawner into them, and only waits: when it
dies the spawner dies, and the other way round. It does so before it imports the rest: of memory
that was there before a fork, the kernel keeps account in each process that comes of it, down to the
last program.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

from . import kernel

_MAX_MESSAGE = 1 << 16


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
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        _prepare(package_path)
        packet, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
    except OSError as error:
        _give_up(control, "start", error)
    if not packet:
        os._exit(0)  # started ahead of a need that did not come
    try:
        _serve(control, {**json.loads(packet), "rootless": rootless, "owner_fd": fds[0]})
    except OSError as error:
        _report(control, "spawner", error)
        os._exit(1)
    os._exit(0)


def _prepare(package_path: str) -> None:
    """All that does not depend on what is wanted."""
    _import_everything()
    # What is imported stays, in this process and in all that come of it: nobody looks again.
    gc.freeze()
    gc.enable()
    # What is ours was found here; what a sandbox imports must not be.
    sys.path.remove(package_path)


def _import_everything() -> None:
    """While our files can still be seen, and before anybody waits."""
    from .. import guest
    from . import resources, spawner, zygote  # noqa: F401

    _import_package(guest.__name__, guest.__path__[0])


def _import_package(package: str, folder: str) -> None:
    for entry in sorted(os.listdir(folder)):
        name, dot, ending = entry.partition(".")
        if dot and ending == "py" and name != "__init__":
            importlib.import_module(f"{package}.{name}")
        elif not dot and name != "__pycache__":
            _import_package(f"{package}.{name}", os.path.join(folder, name))


def _serve(control: socket.socket, options: dict[str, Any]) -> None:
    from .child import Start
    from .resources import Resources
    from .spawner import Spawner
    from .zygote import Zygote

    # A sandbox costs a descriptor or two; what it may open itself is limited later.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Who has ended is gone: neither we nor the zygote have to wake up for it. (Guests change that
    # for themselves.)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resources = Resources(options)
    start = Start(
        resources.own_pidns,
        resources.place,
        resources.filters,
        options["failpoints"],
        options["setup"]["env"],
        options["setup"]["python"],
        resources.own_network,
        resources.capabilities,
    )
    resources.skip_small_pids()
    zygote = Zygote(start, options["modules"], (control.fileno(), options["owner_fd"]))
    # An owner that is gone already is noticed by the loop, which then cleans up.
    with contextlib.suppress(OSError):
        posture = {**resources.posture(), "missing_modules": zygote.missing}
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
    return os.waitstatus_to_exitcode(status) & 0x7F


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
