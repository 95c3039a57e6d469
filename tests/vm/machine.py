"""Boots a software-emulated Linux with cgroup v2 only, runs one command in it, powers it off.

How it works: `scripts/vm_tools.sh` makes a kernel, a boot archive and a disk once and caches them.
Each run packs the project's source and the command into a tar file and gives it to QEMU as a
second drive; writes to the first go to a scratch file that QEMU drops. In the machine `boot.sh`
unpacks the tar and `init.sh` runs the command, prints its output and, as the last line,
`PARACLE-VM-EXIT=<code>` on the serial console, which is QEMU's standard output here.

From a shell: `python tests/vm/machine.py [--account tester] 'cat /proc/self/cgroup'`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROJECT = Path(__file__).resolve().parents[2]
PACKED = ("src", "tests", "pyproject.toml", "README.md")
NEVER_PACKED = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}

START_MARK = re.compile(r"^PARACLE-VM-START=([0-9.]+)$", re.MULTILINE)
EXIT_MARK = re.compile(r"^PARACLE-VM-EXIT=(\d+)$", re.MULTILINE)

# tester has a part of the cgroup tree of its own, as under a desktop session;
# tester-undelegated has none, as after a plain ssh login.
Account = Literal["root", "tester", "tester-undelegated"]
ACCOUNTS: tuple[Account, ...] = ("root", "tester", "tester-undelegated")


class VmUnavailableError(Exception):
    """The machine cannot be built here; the message says what is missing."""


class VmError(Exception):
    """The machine did not boot, or ended without an exit code."""


@dataclass(frozen=True)
class VmParts:
    kernel: Path
    boot_archive: Path
    disk: Path


@dataclass(frozen=True)
class VmResult:
    exit_code: int
    output: str
    boot_seconds: float  # from the start of QEMU to the start of the command, by the host's clock
    total_seconds: float


def prepare() -> VmParts:
    """The machine's parts, built if they are missing. Raises VmUnavailableError."""
    script = PROJECT / "scripts" / "vm_tools.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    built = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        reason = built.stderr.strip().splitlines()[-3:]
        raise VmUnavailableError("; ".join(reason) or f"{script.name} failed")
    folder = Path(built.stdout.strip().splitlines()[-1])
    return VmParts(folder / "vmlinuz", folder / "boot.cpio", folder / "root.ext4")


def run_in_vm(command: Sequence[str] | str, timeout: float, account: Account = "root") -> VmResult:
    """Run a command (an argv, or a line for `sh`) in the project's folder of a fresh machine.

    Its output is standard output and error together. `timeout` covers booting too. Raises
    VmUnavailableError when the machine cannot be built, TimeoutError when it was still running
    and was killed, VmError when it ended without an exit code.
    """
    parts = prepare()
    line = command if isinstance(command, str) else shlex.join(command)
    with tempfile.TemporaryDirectory(prefix="paracle-vm-") as scratch:
        drive = Path(scratch, "project.tar")
        pack_project(drive, line, account)
        return _boot(qemu_argv(parts, drive), Path(scratch, "console"), timeout)


def pack_project(drive: Path, command: str, account: Account) -> None:
    with tarfile.open(drive, "w") as archive:
        for name in PACKED:
            if (PROJECT / name).exists():
                archive.add(PROJECT / name, name, filter=_as_roots_source)
        _add_text(archive, ".vm/command", command + "\n")
        _add_text(archive, ".vm/account", account + "\n")


def _as_roots_source(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(entry.name).name in NEVER_PACKED:
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    # Readable by tester whatever the umask of the checkout was.
    entry.mode |= 0o555 if entry.isdir() else 0o444
    return entry


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o644
    archive.addfile(entry, io.BytesIO(content))


def qemu_argv(parts: VmParts, project: Path) -> list[str]:
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "3G"),
        *("-kernel", str(parts.kernel), "-initrd", str(parts.boot_archive)),
        *("-append", "console=ttyS0 quiet loglevel=1 panic=-1"),
        *("-drive", f"file={parts.disk},format=raw,if=virtio,snapshot=on"),
        *("-drive", f"file={project},format=raw,if=virtio,readonly=on"),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot", "-nic", "none"),
    ]


def _boot(argv: list[str], console: Path, timeout: float) -> VmResult:
    started = time.monotonic()
    boot_seconds = 0.0
    with console.open("wb") as sink:
        machine = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
        )
        try:
            while machine.poll() is None:
                if time.monotonic() - started > timeout:
                    raise TimeoutError(
                        f"the machine ran longer than {timeout:g} s:\n{_tail(_text(console))}"
                    )
                if not boot_seconds and START_MARK.search(_text(console)):
                    boot_seconds = time.monotonic() - started
                _wait_briefly(machine)
        finally:
            machine.kill()
            machine.wait()
    return _result(_text(console), boot_seconds, time.monotonic() - started)


def _wait_briefly(machine: subprocess.Popen[bytes]) -> None:
    try:
        machine.wait(0.1)
    except subprocess.TimeoutExpired:
        return


def _text(console: Path) -> str:
    return console.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")


def _tail(text: str) -> str:
    return text[-4000:]


def _result(text: str, boot_seconds: float, total_seconds: float) -> VmResult:
    begin = START_MARK.search(text)
    ends = list(EXIT_MARK.finditer(text))  # the last is ours: the command may print one too
    if begin is None or not ends:
        raise VmError(f"the machine ended without an exit code:\n{_tail(text)}")
    output = text[begin.end() + 1 : ends[-1].start() - 1]
    return VmResult(int(ends[-1].group(1)), output, boot_seconds, total_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", help="a line for sh, run in the project's folder")
    parser.add_argument("--account", choices=ACCOUNTS, default="root")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS")
    given = parser.parse_args()
    result = run_in_vm(given.command, given.timeout, given.account)
    print(result.output, end="")
    print(
        f"exit code {result.exit_code}; command began after {result.boot_seconds:.1f} s, "
        f"machine ended after {result.total_seconds:.1f} s",
        file=sys.stderr,
    )
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
