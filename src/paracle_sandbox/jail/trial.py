"""Try each step that a native sandbox is made of, and report which of them the kernel refuses.

The owner starts this program when a sandbox could not be made, and before ``auto`` takes native in
a confined process, with the interpreter, the user and the rights of its spawner. It makes nothing
that outlives it: all of it happens in namespaces of its own. A step that fails does not end the
trial, so that all obstacles are known at once; what cannot be tried because an earlier step failed
is left out.

It prints one JSON list of {"step", "errno", "message"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from . import kernel

_UID = 1000
_NAMESPACES = {
    "mount namespace": kernel.CLONE_NEWNS,
    "ipc namespace": kernel.CLONE_NEWIPC,
    "uts namespace": kernel.CLONE_NEWUTS,
    "cgroup namespace": kernel.CLONE_NEWCGROUP,
    "network namespace": kernel.CLONE_NEWNET,
}


class Trial:
    """Tries steps, and keeps a list of those that failed."""

    def __init__(self) -> None:
        self.failed: list[dict[str, Any]] = []

    def attempt(self, step: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except OSError as error:
            self.failed.append({"step": step, "errno": error.errno or 0, "message": str(error)})
            return False
        return True


def main(folder: str) -> None:
    """``folder`` is an empty directory, which gets a file system in a namespace of the trial."""
    trial = Trial()
    rootless = os.geteuid() != 0
    own_user = not rootless or trial.attempt("user namespace", _become_root)
    if own_user and trial.attempt("pid namespace", lambda: kernel.unshare(kernel.CLONE_NEWPID)):
        trial.failed += _in_child(lambda: _try_sandbox(folder, rootless=rootless))
    sys.stdout.write(json.dumps(trial.failed))


def _become_root() -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    _map(uid, gid)


def _map(uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_UID} {uid} 1"),
        ("gid_map", f"{_UID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _in_child(action: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The child is the first process of the new pid namespace, as a sandbox's is."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(action()).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    found: list[dict[str, Any]] = json.loads(answer) if answer else []
    return found


def _try_sandbox(folder: str, *, rootless: bool) -> list[dict[str, Any]]:
    trial = Trial()
    made = {
        step: trial.attempt(step, lambda flag=flag: kernel.unshare(flag))  # type: ignore[misc]
        for step, flag in _NAMESPACES.items()
    }
    if made["network namespace"]:
        trial.attempt("loopback", kernel.loopback_up)
    if made["uts namespace"]:
        trial.attempt("hostname", lambda: socket.sethostname("sandbox"))
    # Without a mount namespace of its own it would change what all others see.
    if made["mount namespace"] and trial.attempt(
        "private mounts", lambda: kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    ):
        _try_mounts(trial, folder)
    trial.attempt("identity", lambda: _take_identity(rootless=rootless))
    return trial.failed


def _try_mounts(trial: Trial, folder: str) -> None:
    if not trial.attempt("tmpfs", lambda: kernel.mount("tmpfs", folder, "tmpfs", 0, "size=1m")):
        return
    for name in ("usr", "proc"):
        os.mkdir(f"{folder}/{name}")
    trial.attempt("bind", lambda: kernel.bind("/usr", f"{folder}/usr", kernel.ATTR_RDONLY))
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    trial.attempt("proc", lambda: kernel.mount("proc", f"{folder}/proc", "proc", flags))
    os.chdir(folder)
    # The old root lies over the new one now: under it no user namespace can be made.
    if trial.attempt("root", lambda: kernel.pivot_root(".", ".")):
        trial.attempt("old root", lambda: kernel.umount("."))


def _take_identity(*, rootless: bool) -> None:
    """A user namespace inside; as root, after giving up being root."""
    if not rootless:
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        keep = kernel.permitted_capabilities() if os.path.exists("/proc/self/status") else 0
        os.setgroups([])
        os.setresgid(_UID, _UID, _UID)
        os.setresuid(_UID, _UID, _UID)
        if keep:
            kernel.capset(0, keep, keep)
    kernel.unshare(kernel.CLONE_NEWUSER)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1])
