"""The engines that tests may need, and what their absence means: asked here and nowhere else.

A test that needs Docker calls ``require("docker")`` first, mostly in a fixture. Without the engine
it is skipped, with the reason and the remedy; PARACLE_REQUIRE_ENGINES=vm,docker,gvisor,incus names
those whose absence is a failure instead. ``make test`` starts what it can (scripts/engines.sh run).
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "engines.sh"
_RUN = Path(os.environ.get("PARACLE_TEST_RUN", "/run/paracle-sandbox-tests"))
SOCKET = _RUN / "docker.sock"
DOCKER_HOST = f"unix://{SOCKET}"
INCUS_SOCKET = str(_RUN / "incus" / "unix.socket")
INCUS_IMAGE = "paracle-test-base"


def require(engine: str) -> None:
    """Returns if it can be used: docker and gvisor at DOCKER_HOST, incus at INCUS_SOCKET."""
    reason = _why_not(engine)
    if reason is not None:
        missing(engine, f"{reason}; scripts/engines.sh start {engine} (root on Debian) has it run")


def missing(engine: str, reason: str) -> NoReturn:
    """Skip the test, or fail it where the engine was promised."""
    message = f"no {engine}: {reason}"
    if engine in os.environ.get("PARACLE_REQUIRE_ENGINES", "").replace(",", " ").split():
        pytest.fail(message)
    pytest.skip(message)


@cache
def _why_not(engine: str) -> str | None:
    asked = subprocess.run([SCRIPT, "status", engine], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return None
    return os.environ.get("PARACLE_ENGINES_REASON") or asked.stderr.strip()
