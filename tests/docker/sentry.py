"""What runs in a sandbox under gVisor, as its kernel, the sentry, tells the host.

None of the processes inside is one of the host's. But whoever is root on the host has the sentry's
control socket: ``runsc debug`` lists processes and threads, ``runsc exec`` starts a program beside
them. Neither passes through the guest or its channel, and nothing inside can answer in its stead.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.sandbox.sandbox import Sandbox

# Ours are in the session of the guest, the first process, into which no program comes from another.
# But a preforked one has its own already, as its program will; it holds a socket to the guest.
# (The fields after the name, which may be anything: state, parent, group, session.)
_PROGRAMS = """
import os
def is_seed(pid, parent):
    folder = "/proc/%s/fd/" % pid
    try:
        held = [os.readlink(folder + fd) for fd in os.listdir(folder) if int(fd) > 2]
    except OSError:
        return False
    return parent == "1" and len(held) == 1 and held[0].startswith("socket:")
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open("/proc/%s/stat" % pid) as file:
            name, _, rest = file.read().rpartition(")")
    except OSError:
        continue
    state, parent, _, session = rest.split()[:4]
    if state not in "ZX" and session not in ("1", str(os.getsid(0))) and not is_seed(pid, parent):
        print(name + ")")
"""


class Sentry:
    """A witness of scenes on gVisor (see pressure.Witness)."""

    own_kernel = True

    def __init__(self, backend: DockerBackend) -> None:
        self._backend = backend

    def processes(self, sandbox: Sandbox) -> list[int]:
        return [one["pid"] for one in self._list(sandbox)]

    def tasks(self, sandbox: Sandbox) -> int:
        return sum(len(one["threads"]) for one in self._list(sandbox))

    def programs(self, sandbox: Sandbox) -> list[str]:
        beside = ("python3", "-I", "-c", _PROGRAMS)
        return self._ask(sandbox, ("exec",), beside).splitlines()

    def _list(self, sandbox: Sandbox) -> list[dict[str, Any]]:
        told = self._ask(sandbox, ("debug", "--ps"))
        return list(json.loads(told[told.index("[\n") :]))

    def _ask(self, sandbox: Sandbox, verb: Sequence[str], words: Sequence[str] = ()) -> str:
        """By the very program that its process is, in the folder which that was told."""
        container = self._backend._owned[sandbox.sandbox_id].container
        process = Path(f"/proc/{self._backend.init_pid(sandbox.sandbox_id)}")
        root = re.search(r"--root=[^\0]+", (process / "cmdline").read_text())
        if root is None:
            raise ProcessLookupError(f"{process} has ended")
        command = [str(process / "exe"), root[0], *verb, container, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise ProcessLookupError(f"{command}: {done.stderr[-300:]}")
        return done.stdout
