"""Makes this interpreter lack what Python has on Linux and not on macOS or Windows.

To be called before anything of the package is imported. What Python's own modules and other
packages need of it is imported before: there they are others. Those that few programs need are
named: ``become("windows", "aiodocker")``.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import importlib
import logging
import os
import pathlib
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import zoneinfo
from typing import Any

import httpx2
import packaging.requirements
import pydantic
import rich.console
import rich.table
import websockets.asyncio.client

_OTHERS = (
    asyncio, http.client, logging, pathlib, shutil, ssl, subprocess, tempfile, zoneinfo, httpx2,
    packaging.requirements, pydantic.BaseModel, rich.console, rich.table,
    websockets.asyncio.client,
)  # fmt: skip

_LINUX = {
    os: "O_PATH O_TMPFILE O_NOATIME pidfd_open memfd_create MFD_CLOEXEC setns unshare eventfd "
    "sched_getaffinity splice copy_file_range P_PIDFD",
    signal: "pidfd_send_signal",
    socket: "AF_NETLINK AF_VSOCK SO_PEERCRED SO_PASSCRED",
    select: "epoll",
}
_UNIX = {
    os: "O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK O_NOCTTY geteuid getuid getgid getegid "
    "getgroups fork openpty statvfs mkfifo mknod killpg setsid getpgid waitid WNOHANG fchown chown "
    "lchown chroot sendfile uname getloadavg sysconf",
    signal: "SIGHUP SIGKILL SIGCHLD SIGWINCH SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGSTOP "
    "SIGCONT SIGTSTP SIGTTOU SIGTTIN setitimer alarm pthread_sigmask sigwait",
    socket: "SCM_RIGHTS recv_fds send_fds AF_UNIX",
    select: "poll",
    # What stays of these methods raises NotImplementedError, as on Windows.
    asyncio.SelectorEventLoop: "add_signal_handler remove_signal_handler create_unix_connection "
    "create_unix_server",
}
_UNIX_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline")


# What is told of processes and machines here, and nowhere else.
_FILES_OF_LINUX = ("/proc/", "/sys/", "/etc/machine-id")


def become(system: str, *packages: str) -> None:
    for name in packages:
        importlib.import_module(name)
    lacks = [_LINUX] if system == "macos" else [_LINUX, _UNIX]
    # Windows makes a pair of another family, and so may the event loop here.
    socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)
    for table in lacks:
        for place, names in table.items():
            for name in names.split():
                if hasattr(place, name):
                    delattr(place, name)
    sys.platform = "darwin" if system == "macos" else "win32"
    sys.addaudithook(_without_files_of_linux)
    os.readlink = functools.partial(_read_link, os.readlink)
    if system == "windows":
        for name in _UNIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
        os.supports_dir_fd = set()
        os.kill = _kill


def _without_files_of_linux(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _refuse_file_of_linux(arguments[0])


def _refuse_file_of_linux(path: object) -> None:
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_FILES_OF_LINUX):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(path))


def _read_link(real: Any, path: Any, **options: Any) -> Any:
    _refuse_file_of_linux(path)
    return real(path, **options)


def _kill(pid: int, number: int) -> None:
    """Windows has no signal that asks: 0 is Ctrl-C there, and any other number ends a process."""
    raise AssertionError(f"process {pid} would have been ended, by signal {number}")
