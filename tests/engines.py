"""The engines that tests may need, and the consequence of their absence: both are decided here
only.

A test that needs Docker calls ``require("docker")`` first, mostly in a fixture. Without the engine
it is skipped, with the reason and the remedy; PARACLE_REQUIRE_ENGINES=vm,docker,gvisor,podman,incus
names those whose absence is a failure instead. ``make test`` starts what it can (scripts/engines.sh
run).
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from paracle_sandbox.images.builder import RECIPE_LABEL
from paracle_sandbox.images.recipe import RECIPES

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "engines.sh"
_RUN = Path(os.environ.get("PARACLE_TEST_RUN", "/run/paracle-sandbox-tests"))
SOCKET = _RUN / "docker.sock"
DOCKER_HOST = f"unix://{SOCKET}"
PODMAN_HOST = f"unix://{_RUN / 'podman.sock'}"
IMAGE = "paracle/sandbox:latest"
INCUS_SOCKET = str(_RUN / "incus" / "unix.socket")
INCUS_IMAGE = "paracle-test-base"


def require(engine: str) -> None:
    """Return if the engine can be used, and skip the test otherwise.

    Docker and gVisor are expected at DOCKER_HOST, Podman at PODMAN_HOST, Incus at INCUS_SOCKET.
    """
    reason = _why_not(engine)
    if reason is not None:
        missing(engine, f"{reason}; scripts/engines.sh start {engine} (root on Debian) has it run")
    if engine in ("docker", "gvisor"):
        _build_image()
    elif engine == "podman":
        require("docker")
        _pass_image_on()


def missing(engine: str, reason: str) -> NoReturn:
    """Skip the test, or fail it where the engine was promised."""
    message = f"no {engine}: {reason}"
    if engine in os.environ.get("PARACLE_REQUIRE_ENGINES", "").replace(",", " ").split():
        pytest.fail(message)
    pytest.skip(message)


def containers_with(label: str) -> list[str]:
    """Return the containers of the Docker engine with this label, also those that do not run."""
    asked = ["docker", "ps", "-aq", "--filter", f"label={label}"]
    done = subprocess.run(asked, env=_at(DOCKER_HOST), capture_output=True, text=True, check=True)
    return done.stdout.split()


@cache
def _why_not(engine: str) -> str | None:
    asked = subprocess.run([SCRIPT, "status", engine], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return None
    return os.environ.get("PARACLE_ENGINES_REASON") or asked.stderr.strip()


@cache
def _build_image() -> None:
    """Build the image of this checkout: one of the same name may be older, or made by hand."""
    if _recipe_of_image(DOCKER_HOST) == RECIPES["sandbox"].digest():
        return
    source = str(SCRIPT.parents[1] / "src")
    env = {**_at(DOCKER_HOST), "PYTHONPATH": os.pathsep.join([source, *sys.path])}
    command = [sys.executable, "-m", "paracle_sandbox", "image", "build"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{IMAGE} cannot be built: {done.stdout}{done.stderr}"


@cache
def _pass_image_on() -> None:
    if _recipe_of_image(PODMAN_HOST) == RECIPES["sandbox"].digest():
        return
    with subprocess.Popen(["docker", "save", IMAGE], env=_at(DOCKER_HOST),
                          stdout=subprocess.PIPE) as save:  # fmt: skip
        subprocess.run(["docker", "load"], stdin=save.stdout, env=_at(PODMAN_HOST), check=True,
                       capture_output=True)  # fmt: skip


def _recipe_of_image(host: str) -> str:
    """Return the digest of the sources that an image was made from; nothing if there is no such
    image of ours."""
    form = f'{{{{index .Config.Labels "{RECIPE_LABEL}"}}}}'
    asked = ["docker", "image", "inspect", "-f", form, IMAGE]
    done = subprocess.run(asked, env=_at(host), capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _at(host: str) -> dict[str, str]:
    return {**os.environ, "DOCKER_HOST": host}
