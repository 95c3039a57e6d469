"""Starting the process that becomes a spawner.

That takes as long as our own imports, and it needs to know nothing until it has imported what is
its own: a command line program can have it started first thing (``launch_ahead``), and the two
go on side by side. It ends by itself when nobody tells it anything.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import NamedTuple

_PACKAGE_PATH = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
# The path of the package comes over the socket: a command line can be read inside.
_PROGRAM = (
    "import json, socket, sys; control = socket.socket(fileno={fd}); "
    "package = json.loads(control.recv(65536))['package_path']; sys.path.insert(0, package); "
    "from paracle_sandbox.jail.launch import main; main(control, package)"
)


class Launched(NamedTuple):
    process: subprocess.Popen[bytes]
    control: socket.socket


_ahead: dict[str, Launched] = {}


def default_python() -> str:
    """The interpreter below this one's virtual environment, if any: the same that sandboxes run."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def launch_ahead() -> None:
    """Start one now, for the next ``launch`` of the usual interpreter."""
    python = default_python()
    if python not in _ahead:
        _ahead[python] = _launch(python)


def launch(python: str) -> Launched:
    """A process that waits for its options on the other end of ``control``."""
    return _ahead.pop(python, None) or _launch(python)


def _launch(python: str) -> Launched:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [python, "-I", "-S", "-E", "-c", _PROGRAM.format(fd=theirs.fileno())],
            # The locale that programs will have; nothing else of ours.
            env={"LANG": "C.UTF-8"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    ours.send(json.dumps({"package_path": _PACKAGE_PATH}).encode())
    ours.setblocking(False)
    return Launched(process, ours)
