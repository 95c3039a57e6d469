"""Pure functions from our configuration to the parameters of Daytona's SDK."""

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
    """Return the image to ask for. Our own images are on no registry that Daytona can reach, so
    they stand for the image of the settings."""
    return default if config.base_image == DEFAULT_IMAGE else config.base_image


def create_parameters(
    sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str], image: str
) -> dict[str, Any]:
    """Return the parameters of a new sandbox. Nothing in it is public, and it has no network unless
    one was asked for."""
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
    """Return cores, and gigabytes of memory and disk. Daytona takes whole gigabytes, so they are
    rounded up."""
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
    """Return the line for a terminal's shell that makes the terminal carry bytes unchanged, prints
    a mark, and becomes the guest.

    The terminal echoes this line before it stops echoing. The echo does not contain the mark
    itself, because printf has yet to put it together.
    """
    folder = shlex.quote(config.working_dir)
    mark = "\\036paracle-ready\\036"
    boot = f"exec python3 -I -c {shlex.quote(_encode())} 0,1"
    line = f"mkdir -p {folder}; cd {folder}; stty raw -echo; printf '{mark}'; {boot}\n"
    return line.encode()


def _encode() -> str:
    """Return the bootstrap as one line: a terminal would act on its tabs and newlines."""
    return f"exec({BOOTSTRAP!r})"


USAGE_SCRIPT = (
    "cd /sys/fs/cgroup && cat memory.current memory.peak pids.current 2>/dev/null; "
    "grep -h -e '^usage_usec' -e '^oom_kill ' cpu.stat memory.events 2>/dev/null; true"
)


def parse_usage(text: str) -> dict[str, int]:
    """Parse what USAGE_SCRIPT prints, as far as the machine there has the figures."""
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
