"""Other interpreters: where they are, as scripts/interpreters.sh knows."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "interpreters.sh"


@cache
def interpreters() -> dict[str, str]:
    """The path of each that is there, by its version."""
    done = subprocess.run([SCRIPT, "list"], capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def require_interpreter(version: str) -> str:
    """Its path. Without it the test is skipped, or fails where it was promised:
    PARACLE_REQUIRE_INTERPRETERS=3.8,3.14 names those that have to be there."""
    path = interpreters().get(version)
    if path is None:
        message = (
            f"no Python {version} in the tests' cache, on the PATH or below pyenv; scripts/"
            f"interpreters.sh fetch {version} gets it if a suite of Debian has it"
        )
        promised = os.environ.get("PARACLE_REQUIRE_INTERPRETERS", "")
        if version in promised.replace(",", " ").split():
            pytest.fail(message)
        pytest.skip(message)
    return path
