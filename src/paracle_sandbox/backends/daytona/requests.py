"""What Daytona is asked for: pure functions from our configuration to the SDK's parameters."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from typing import Any

from ...channel.bootstrap import BOOTSTRAP
from ...config import DEFAULT_IMAGE, SandboxConfig

# Told apart from other sandboxes of the same account.
LABEL = "paracle-sandbox"
OWNER = "paracle-owner"
# One that nobody talks to stops after this, and what stops is deleted: a crash leaves no bill.
IDLE_MINUTES = 15
READY = b"\x1eparacle-ready\x1e"


def image_of(config: SandboxConfig, default: str) -> str:
    """Ours is on no registry that Daytona sees: it stands for the one of the settings."""
    return default if config.base_image == DEFAULT_IMAGE else config.base_image


def create_parameters(
    sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str], image: str
) -> dict[str, Any]:
    """Nothing is public, and without a network of ours there is none."""
    return {
        "name": sandbox_id,
        "image": image,
        "labels": {**labels, LABEL: sandbox_id, OWNER: str(os.getpid())},
        "public": False,
        "auto_stop_interval": IDLE_MINUTES,
        "auto_delete_interval": 0,
        "network_block_all": config.network_mode == "none",
    }


def resources(config: SandboxConfig) -> tuple[int, int, int]:
    """Cores, and gigabytes of memory and disk: whole ones, which is what there is to be had, and
    never less than asked."""
    return (
        max(1, math.ceil(config.cpu_cores)),
        max(1, math.ceil(config.memory_mb / 1024)),
        max(1, math.ceil(config.disk_mb / 1024)),
    )


def guest_setup(config: SandboxConfig) -> dict[str, Any]:
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/tmp/.local/bin",
           "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}  # fmt: skip
    return {"working_dir": config.working_dir, "env": {**env, **config.env_vars}}


def start_line(config: SandboxConfig) -> bytes:
    """For the shell of a terminal: make it carry bytes unchanged, say so, become the guest.

    The terminal echoes this line before it is told not to; the mark in the echo is not the mark,
    because printf has yet to make it."""
    folder = shlex.quote(config.working_dir)
    mark = "\\036paracle-ready\\036"
    boot = f"exec python3 -I -c {shlex.quote(_encoded())} 0,1"
    line = f"mkdir -p {folder}; cd {folder}; stty raw -echo; printf '{mark}'; {boot}\n"
    return line.encode()


def _encoded() -> str:
    """The bootstrap in one line: a terminal would act on its tabs and newlines."""
    return f"exec({BOOTSTRAP!r})"


USAGE_SCRIPT = (
    "cd /sys/fs/cgroup && cat memory.current memory.peak pids.current 2>/dev/null; "
    "grep -h -e '^usage_usec' -e '^oom_kill ' cpu.stat memory.events 2>/dev/null; true"
)


def parse_usage(text: str) -> dict[str, int]:
    """Figures of USAGE_SCRIPT, as far as the place has them."""
    numbers: list[int] = []
    named: dict[str, int] = {}
    for line in text.split("\n"):
        words = line.split()
        if len(words) == 1 and words[0].isdigit():
            numbers.append(int(words[0]))
        elif len(words) == 2 and words[1].isdigit():
            named[words[0]] = int(words[1])
    figures = dict(zip(("memory", "peak", "processes"), numbers, strict=False))
    return {**figures, **named}
