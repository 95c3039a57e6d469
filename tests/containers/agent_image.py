"""The image of deploy/containers on the engine of the tests, and what is run in it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
from paracle_sandbox.images.package_index import read_machine_files

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "deploy/containers"
# Always the same, so that the engine need not build again what has not changed.
IMAGE = "paracle-test/agent:latest"
IN_CONTEXT = ("deploy", "docker", "src", "pyproject.toml", "README.md", "LICENSE", ".dockerignore")
# How a build of this machine reaches its packages, and those of them that seldom change.
_REACH_PACKAGES = """\
COPY pip.conf* ca.pem* pyproject.toml /build/
ENV PIP_CONFIG_FILE=/build/pip.conf
RUN python3 -c "import tomllib; p = tomllib.load(open('/build/pyproject.toml', 'rb'))['project']; \\
print(*p['dependencies'], *p['optional-dependencies']['docker'], sep='\\n')" > /build/r \\
    && python3 -m pip install --no-cache-dir --root-user-action ignore -r /build/r hatchling
"""


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str


class Agent:
    """A container of an agent: a program that makes sandboxes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profile = folder / "paracle-seccomp.json"
        shutil.copy(CONTAINERS / "paracle-seccomp.json", self.profile)
        self.program = folder / "agent.py"
        self.program.write_text("print(6 * 7)\n")
        context = folder / "context"
        context.mkdir()
        for name in IN_CONTEXT:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, context / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, context / name)
        for name, content in read_machine_files().items():
            (context / name).write_bytes(content)
        (context / ".dockerignore").write_text("**/__pycache__\n")
        first, _, rest = (CONTAINERS / "Dockerfile").read_text().partition("COPY ")
        (context / "Dockerfile").write_text(f"{first}{_REACH_PACKAGES}COPY {rest}")
        built = _docker("build", "-q", "--network", "host", "-t", IMAGE, str(context))
        assert built.code == 0, built.stdout[-2000:] + built.stderr[-3000:]

    def run(self, options: Sequence[str], command: str) -> Ran:
        """A shell command in a container; the profile is where the options name it."""
        return _docker("run", "--rm", "--network", "none", *self._here(options),
                       "-v", f"{self.program}:/agent/agent.py:ro", "-w", "/agent", IMAGE,
                       "sh", "-c", command)  # fmt: skip

    def execute(self, options: Sequence[str], backend: str = "native") -> Ran:
        return self.run(options, f"paracle sandbox execute --backend {backend} agent.py")

    def execute_on_podman(self, options: Sequence[str], backend: str = "native") -> Ran:
        """With its own command, which has options that the API has not. The ulimits are only
        because its defaults want more than this machine may give."""
        folder = engines.SOCKET.parent / "podman"
        environment = {
            **os.environ, "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }  # fmt: skip
        command = [
            "podman", "run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024",
            "--ulimit", "nproc=4096:4096", *self._here(options),
            "-v", f"{self.program}:/agent/agent.py:ro", "-w", "/agent", f"localhost/{IMAGE}",
            "paracle", "sandbox", "execute", "--backend", backend, "agent.py",
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def running(self, source: str) -> Iterator[None]:
        """Meanwhile this is agent.py."""
        before = self.program.read_text()
        self.program.write_text(source)
        try:
            yield
        finally:
            self.program.write_text(before)

    @contextmanager
    def passed_on_to_podman(self) -> Iterator[None]:
        there = {**os.environ, "DOCKER_HOST": engines.PODMAN_HOST}
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            saved = _docker("save", "-o", file.name, IMAGE)
            assert saved.code == 0, saved.stderr
            subprocess.run(["docker", "load", "-q", "-i", file.name], env=there, check=True,
                           capture_output=True)  # fmt: skip
        try:
            yield
        finally:
            subprocess.run(["docker", "rmi", "-f", IMAGE], env=there, capture_output=True)

    def layers(self, options: Sequence[str]) -> dict[str, Any]:
        """What `health` says of native: of each layer whether it is in force."""
        ran = self.run(options, "paracle sandbox health --backend native --json")
        assert ran.code == 0, ran.stdout + ran.stderr
        told = json.loads(ran.stdout)
        found = told["backends"][0] if "backends" in told else told
        return {layer["name"]: layer["in_force"] for layer in found["layers"]}

    def line(self, line: str) -> Ran:
        """A `docker run` line of the documentation, as it is: only its image is another."""
        words = shlex.split(line)
        at = words.index("my-agent")
        assert words[:2] == ["docker", "run"] and words[at + 1 :][-1] == "agent.py", line
        return self.run(
            [word for word in words[2:at] if word != "--rm"], shlex.join(words[at + 1 :])
        )

    def _here(self, options: Sequence[str]) -> list[str]:
        return [word.replace("paracle-seccomp.json", str(self.profile)) for word in options]


def _docker(*words: str) -> Ran:
    environment = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(
        ["docker", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)
