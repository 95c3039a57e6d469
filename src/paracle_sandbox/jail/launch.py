"""How a spawner comes up: the program that the owner starts, and its two processes.

The owner runs ``python3 -I -S -E -c ...`` with a locale and no other environment. The
started process (the launcher) makes the namespaces that need a fork to take effect, forks the
spawner into them, and only waits: when it dies the spawner dies, and the other way round.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from . import kernel


def main(control: socket.socket, options: dict[str, Any]) -> None:
    step = "start"
    try:
        options["rootless"] = os.geteuid() != 0
        options["owner_fd"] = os.pidfd_open(options["owner_pid"])
        step = "user namespace"
        if options["rootless"]:
            _become_root_of_a_user_namespace()
        step = "pid namespace"
        kernel.unshare(kernel.CLONE_NEWPID)
        spawner = os.fork()
        if spawner:
            control.close()
            os._exit(_wait(spawner))
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        step = "spawner"
        _serve(control, options)
    except OSError as error:
        _report(control, step, str(error), error.errno or 0)
        os._exit(1)
    os._exit(0)


def _serve(control: socket.socket, options: dict[str, Any]) -> None:
    from .ground import Ground, import_guest
    from .spawner import Spawner

    # A sandbox costs a descriptor or two; what it may open itself is limited later.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    import_guest()
    # What is ours was found here; what a sandbox imports must not be.
    sys.path.remove(options["package_path"])
    ground = Ground(options)
    control.setblocking(False)
    # An owner that is gone already is noticed by the loop, which then cleans up.
    with contextlib.suppress(OSError):
        control.send(json.dumps({"event": "ready", **ground.posture()}).encode())
    Spawner(control, ground, options).run()


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


def _report(control: socket.socket, step: str, message: str, code: int) -> None:
    with contextlib.suppress(OSError):
        packet = {"event": "failed", "step": step, "message": message, "errno": code}
        control.send(json.dumps(packet).encode())
