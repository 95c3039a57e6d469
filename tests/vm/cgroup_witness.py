"""Runs a command and reports, from outside it, which cgroup v2 limits held processes meanwhile.

Used in the test machine: that the tests passed does not show that limits were kept by cgroup v2,
so a process of its own looks at the tree while they run. Its last line is
`CGROUP-WITNESS=<json>`: the layout found, and each cgroup that had both a memory limit and a
process in it. The exit code is the command's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
INTERVAL_SECONDS = 0.25  # the machine is emulated: a look takes a while
MARK = "CGROUP-WITNESS="


def layout() -> dict[str, list[str]]:
    """The mounted cgroup filesystems by version; a v2-only machine has one, and no v1."""
    found: dict[str, list[str]] = {"cgroup2": [], "cgroup": []}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind in found:
            found[kind].append(folder)
    return found


def read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # the cgroup was removed under our eyes, or has no such controller
        return None


def limits_with_processes(folder: Path) -> dict[str, str | None] | None:
    limits = {name: read(folder / name) for name in LIMITS}
    if limits["memory.max"] in (None, "max") or read(folder / "pids.current") in (None, "0"):
        return None
    return limits


def look(seen: dict[str, dict[str, str | None]]) -> None:
    for name, _, _ in os.walk(CGROUP):
        path = name[len(str(CGROUP)) :]
        limits = limits_with_processes(Path(name)) if path else None
        if limits:
            seen[path] = limits


def main(argv: list[str]) -> int:
    seen: dict[str, dict[str, str | None]] = {}
    command = subprocess.Popen(argv)
    while True:
        look(seen)
        try:
            code = command.wait(INTERVAL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        few = dict(list(seen.items())[:5])  # enough to prove it, short enough to read
        print(MARK + json.dumps({"layout": layout(), "limited": few}), flush=True)
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
