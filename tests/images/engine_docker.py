"""The engine of the tests, used as a person would: the docker command and the paracle command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines

PROJECT = Path(__file__).resolve().parents[2]


def docker(*words: str, program: str = "docker", **variables: str) -> str:
    """What a docker command prints. It must succeed."""
    return _run([program, *words], variables)


def run_in(image: str, *command: str, options: Sequence[str] = ()) -> str:
    return docker("run", "--rm", "--network", "none", *options, image, *command).strip()


def inspect(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("image", "inspect", image))[0]
    return found


def paracle(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST, **variables}
    environment["PYTHONPATH"] = str(PROJECT / "src")
    return subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", *words],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def _run(argv: Sequence[str], variables: dict[str, str]) -> str:
    environment = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST, **variables}
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
