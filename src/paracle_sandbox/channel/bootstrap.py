"""Bring the guest into a sandbox that has only a Python: its source travels over the channel.

The backend starts ``python3 -I -c BOOTSTRAP FD`` in the sandbox. The host then sends
boot_message(setup), and from there on that process is the guest. Any Python from 3.8 works.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import MAGIC_NUMBER
from typing import Any

_ROOT = __name__.split(".", 1)[0]
# The modules of the jail that are also used inside of a container or an instance.
_JAIL_MODULES = {
    "jail": ("confine", "kernel", "root", "shape", "steps"),
    "jail.filters": ("bpf", "landlock", "policy", "rules", "seccomp", "syscalls"),
    "jail.instance": ("confine_instance",),
}

# This program is passed as an argument, so it has to be brief. Every sandbox waits for it, so it
# imports almost nothing. It loads the guest's modules from memory, and keeps their source for
# tracebacks. Its argument is the channel's descriptor, or "0,1" where the channel is two pipes.
BOOTSTRAP = """
import json, marshal, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",")]
def take(count):
    data = b""
    while len(data) < count:
        piece = os.read(fds[0], count - len(data))
        if not piece:
            sys.exit("paracle: the channel ended before the guest arrived")
        data += piece
    return data
def part():
    return take(int.from_bytes(take(4), "big"))
boot = json.loads(part())
compiled = part()
magic = getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"").hex()
codes = marshal.loads(compiled) if magic == boot["magic"] else {}
class Bundle:
    def find_spec(self, name, path=None, target=None):
        if name in boot["modules"]:
            package = any(other.startswith(name + ".") for other in boot["modules"])
            return type(os.__spec__)(name, self, is_package=package)
    def get_source(self, name):
        return boot["modules"][name]
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        code = codes.get(module.__name__)
        if code is None:
            source = self.get_source(module.__name__)
            code = compile(source, "<paracle>", "exec", dont_inherit=True)
        exec(code, module.__dict__)
sys.meta_path.insert(0, Bundle())
boot["setup"].setdefault("python", sys.executable)
sys.argv[:] = [""]
if boot.get("confine"):
    from paracle_sandbox.jail.instance.confine_instance import confine
    confine(boot["confine"])
from paracle_sandbox.guest.main import serve
serve(fds[0], boot["setup"], *fds[1:])
"""


@cache
def bundle() -> Mapping[str, str]:
    """Return the source of each of the guest's modules, by module name."""
    sources = {_ROOT: "", f"{_ROOT}.channel": ""}
    sources[f"{_ROOT}.channel.frames"] = _read_source("channel", "frames.py")
    _add_sources(sources, f"{_ROOT}.guest", resources.files(f"{_ROOT}.guest"))
    return sources


def _add_sources(sources: dict[str, str], package: str, folder: Traversable) -> None:
    for entry in folder.iterdir():
        if entry.name.endswith(".py"):
            name = f"{package}.{entry.name[:-3]}".removesuffix(".__init__")
            sources[name] = entry.read_text(encoding="utf-8")
        elif entry.is_dir() and entry.name != "__pycache__":
            _add_sources(sources, f"{package}.{entry.name}", entry)


@cache
def bootstrap_as_root() -> str:
    """Return the bootstrap for an engine that starts us as root of the sandbox.

    One process, the porter, stays root and waits. Its child goes on as BOOTSTRAP does, and has to
    be sent boot_message(setup, confine).
    """
    return _read_source("jail.instance", "porter.py") + "\nleave_porter()\n" + BOOTSTRAP


@cache
def _bundle_with_jail() -> Mapping[str, str]:
    """Return the guest's modules, and those of the jail with which a guest confines itself."""
    sources = {f"{_ROOT}.jail": ""}
    for package, names in _JAIL_MODULES.items():
        sources[f"{_ROOT}.{package}"] = ""
        for name in names:
            sources[f"{_ROOT}.{package}.{name}"] = _read_source(package, f"{name}.py")
    return {**bundle(), **sources}


@cache
def _compile_modules(confining: bool) -> bytes:
    """Compile the bundle with our own Python.

    A guest with the same version of Python then need not compile it, which is a third of the time
    until it answers.
    """
    codes = {
        name: compile(source, "<paracle>", "exec", dont_inherit=True)
        for name, source in (_bundle_with_jail() if confining else bundle()).items()
    }
    return marshal.dumps(codes)


def boot_message(setup: Mapping[str, Any], confine: Mapping[str, Any] | None = None) -> bytes:
    """Return the first bytes for a new channel: modules and setup as JSON, then compiled modules.

    Each of the two parts follows its length. With ``confine``, a plan for
    jail/instance/confine_instance.py, the guest confines itself first: this is for engines that
    start it as root.
    """
    content: dict[str, Any] = {"magic": MAGIC_NUMBER.hex(), "setup": dict(setup)}
    if confine is None:
        content["modules"] = dict(bundle())
    else:
        content |= {"modules": dict(_bundle_with_jail()), "confine": dict(confine)}
    parts = (json.dumps(content).encode("ascii"), _compile_modules(confine is not None))
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _read_source(package: str, name: str) -> str:
    return resources.files(f"{_ROOT}.{package}").joinpath(name).read_text(encoding="utf-8")
