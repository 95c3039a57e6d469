"""What an image of one's own brings along: its files are there, and nothing is without a limit."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_fixtures import Make

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.endpoint import Endpoint
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import ResourceLimitError, SandboxCreationError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

EVERYWHERE = pytest.mark.parametrize("engine", ["docker", "gvisor", "podman"])
HOSTS = {"podman": engines.PODMAN_HOST}
RECIPE = """\
FROM paracle/sandbox:latest
COPY --chown=paracle:paracle hello.py /workspace/scripts/hello.py
COPY hello.py /workspace/of_root.py
RUN ln /workspace/scripts/hello.py /workspace/scripts/hard.py \
    && ln -s /usr/bin/env /workspace/link && chmod 555 /workspace/scripts \
    && head -c 5M /dev/zero >/workspace/five
"""


def docker(engine: str, *words: str, stdin: bytes = b"") -> str:
    env = {**os.environ, "DOCKER_HOST": HOSTS.get(engine, engines.DOCKER_HOST),
           "DOCKER_BUILDKIT": "0"}  # fmt: skip
    done = subprocess.run(["docker", *words], input=stdin, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def build(engine: str, recipe: str) -> str:
    """The name of a new image."""
    engines.require(engine)
    context, name = io.BytesIO(), f"paracle-test/brings:{os.urandom(4).hex()}"
    with tarfile.open(fileobj=context, mode="w") as tar:
        for path, text in (("Dockerfile", recipe), ("hello.py", "print('hello')\n")):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    docker(engine, "build", "-q", "-t", name, "-", stdin=context.getvalue())
    return name


@pytest.fixture
def image(engine: str, request: pytest.FixtureRequest) -> Iterator[str]:
    name = build(engine, getattr(request, "param", RECIPE))
    yield name
    docker(engine, "rmi", name)


def created(engine: str, backend: DockerBackend, since: float) -> int:
    """How many containers of a backend there were."""
    label = f"label=paracle.session={backend.session}"
    words = ["--since", f"{since:.9f}", "--until", f"{time.time():.9f}"]
    return docker(engine, "events", *words, "--filter", "event=create", "--filter", label).count(
        "container create"
    )


@EVERYWHERE
async def test_its_files_are_in_the_workspace(image: str, make: Make) -> None:
    for _ in range(2):
        sandbox = await make(SandboxConfig(base_image=image))
        said = await sandbox.run_command("python3 scripts/hello.py; readlink link; ls -A")
        assert said == "hello\n/usr/bin/env\nfive\nlink\nof_root.py\nscripts\n"
        who = await sandbox.run_command("stat -c '%u %h %a' of_root.py scripts/hard.py scripts .")
        assert who.splitlines() == ["1000 1 644", "1000 2 644", "1000 1 555", "1000 1 755"]
        await sandbox.run_command("echo more >>of_root.py; touch scripts/../new")
        stats = await sandbox.get_stats()
        assert stats["disk_mb"] >= 5, "they count"


async def test_elsewhere_than_in_the_workspace(image: str, make: Make) -> None:
    sandbox = await make(SandboxConfig(base_image=image, working_dir="/workspace/scripts"))
    assert await sandbox.run_command("ls -A") == "hard.py\nhello.py\n"


async def test_one_without_files_is_looked_at_once(settings: Settings) -> None:
    config, since = SandboxConfig(), time.time()
    for containers in (3, 2):
        backend = DockerBackend(settings)
        for number in range(2):
            async with Sandbox(backend, f"looked-{os.getpid()}-{number}", config) as sandbox:
                assert await sandbox.run_command("ls -A") == ""
        await backend.close()
        assert created("docker", backend, since) == containers


TOO_MUCH = "FROM paracle/sandbox:latest\nRUN truncate -s 257M /workspace/big\n"


@pytest.mark.parametrize("image", [TOO_MUCH], indirect=True)
async def test_too_much_is_refused(backend: DockerBackend, image: str) -> None:
    with pytest.raises(SandboxCreationError, match="has more than 256 MB in /workspace"):
        await Sandbox(backend, "too-much", SandboxConfig(base_image=image)).start()
    label = f"label=paracle.session={backend.session}"
    assert docker("docker", "ps", "-aq", "--filter", label) == ""


VOLUMES = """\
FROM paracle/sandbox:latest
USER root
RUN mkdir -p /data/sub && echo seed >/data/sub/seed
USER paracle
VOLUME /data/ /workspace /var/more
"""


@EVERYWHERE
@pytest.mark.parametrize("image", [VOLUMES], indirect=True)
async def test_its_volumes_are_below_the_limit(
    engine: str, image: str, make: Make, backend: DockerBackend
) -> None:
    before = docker(engine, "volume", "ls", "-q")
    sandbox = await make(SandboxConfig(base_image=image, disk_mb=256, memory_mb=1024))
    assert docker(engine, "volume", "ls", "-q") == before, "one that nobody limits"
    assert await sandbox.run_command("cat /data/sub/seed; touch /var/more/new") == "seed\n"
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.execute("head -c 300M /dev/zero >/data/filled")
    assert caught.value.resource_type == "disk"


@pytest.mark.parametrize("image", [VOLUMES], indirect=True)
async def test_a_volume_that_was_given_stays(image: str, make: Make, settings: Settings) -> None:
    given = Path(settings.volumes[0])
    given.mkdir(parents=True)
    (given / "file").write_text("of the host")
    sandbox = await make(SandboxConfig(base_image=image, volumes={str(given): "/data"}))
    assert await sandbox.run_command("cat /data/*; touch /var/more/new") == "of the host"


@pytest.mark.parametrize("image", [VOLUMES], indirect=True)
async def test_its_volumes_in_memory(
    image: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an engine of another machine."""
    monkeypatch.setattr(Endpoint, "shares_our_files", False)
    backend = DockerBackend(settings)
    before = docker("docker", "volume", "ls", "-q")
    config = SandboxConfig(base_image=image, disk_mb=256, memory_mb=1024)
    async with Sandbox(backend, f"in-memory-{os.getpid()}", config) as sandbox:
        assert docker("docker", "volume", "ls", "-q") == before
        assert await sandbox.run_command("cat /data/sub/seed") == "seed\n"
        with pytest.raises(ResourceLimitError):
            await sandbox.execute("head -c 300M /dev/zero >/data/filled")
    await backend.close()
