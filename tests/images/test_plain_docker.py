"""The Dockerfiles without our command: plain docker build, and images of one's own."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from engine_docker import PROJECT, docker, inspect, paracle, run_in

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.images.package_index import read_machine_files
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The folder `docker`, with how this machine reaches its packages as the README says."""
    shutil.copytree(PROJECT / "docker", tmp_path / "docker")
    shutil.copy(PROJECT / ".dockerignore", tmp_path)
    for name, content in read_machine_files().items():
        (tmp_path / "docker" / name).write_bytes(content)
    return tmp_path


def build_in(
    folder: Path, *words: str, builder: str = "0", program: str = "docker"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST, "DOCKER_BUILDKIT": builder}
    return subprocess.run(
        [program, "build", "--network", "host", *words, "."],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def a_docker_with_buildkit() -> str:
    """Debian's own command has it built in; a newer one needs a plugin."""
    for program in ("docker", "/usr/bin/docker"):
        if shutil.which(program) is None:
            continue
        if subprocess.run([program, "buildx", "version"], capture_output=True).returncode == 0:
            return program
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        if "version 20." in version:
            return program
    pytest.skip("no docker command with BuildKit: apt install docker.io, or docker-buildx-plugin")


@pytest.mark.parametrize(
    ("where", "file", "builder"),
    [(".", "docker/Dockerfile.sandbox", "0"), ("docker", "Dockerfile.sandbox", "1")],
    ids=["classic, at the root", "buildkit, in docker"],
)
def test_plain_docker_build(checkout: Path, where: str, file: str, builder: str) -> None:
    name = f"paracle-test/plain:{builder}"
    program = "docker" if builder == "0" else a_docker_with_buildkit()
    words = ["-t", name, "-f", file]
    done = build_in(checkout / where, *words, builder=builder, program=program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    try:
        assert run_in(name, "python3", "-c", "import requests, os; print(os.getuid())") == "1000"
        assert inspect(name)["Config"]["Labels"]["paracle.image.variant"] == "sandbox"
        leftovers = "ls -d /build /installed 2>/dev/null | wc -l"
        assert run_in(name, "sh", "-c", leftovers) == "0"
    finally:
        docker("rmi", name)
        docker("image", "prune", "-f", "--filter", "label=paracle.image.stage=by-hand")


CUSTOM = """\
FROM paracle/sandbox:latest

USER root
COPY own_package-1.0-py3-none-any.whl /tmp/
RUN pip install --no-index /tmp/own_package-1.0-py3-none-any.whl
USER paracle

COPY --chown=paracle:paracle scripts/ /workspace/scripts/
"""


def test_an_image_of_ones_own(tmp_path: Path) -> None:
    assert paracle("image", "build", "--if-missing").returncode == 0
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "hello.py").write_text("import own_package; print(own_package.WORD)")
    (tmp_path / "Dockerfile").write_text(CUSTOM)
    make_wheel(tmp_path / "own_package-1.0-py3-none-any.whl")
    done = build_in(tmp_path, "-t", "paracle-test/own:1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    try:
        assert run_in("paracle-test/own:1", "python3", "scripts/hello.py") == "installed"
        owner = run_in("paracle-test/own:1", "stat", "-c", "%U:%G", "scripts/hello.py")
        assert owner == "paracle:paracle"
        assert asyncio.run(run_in_sandbox("paracle-test/own:1", tmp_path)) == "installed\n"
    finally:
        docker("rmi", "paracle-test/own:1")


async def run_in_sandbox(image: str, folder: Path) -> str:
    settings = Settings(
        docker_host=engines.DOCKER_HOST, state_dir=f"{folder}/state", data_dir=f"{folder}/data"
    )
    backend = DockerBackend(settings)
    try:
        async with Sandbox(backend, "of-ones-own", SandboxConfig(base_image=image)) as sandbox:
            return await sandbox.run_command("python3 scripts/hello.py")
    finally:
        await backend.close()


def make_wheel(path: Path) -> None:
    about = "own_package-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("own_package.py", "WORD = 'installed'\n")
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
