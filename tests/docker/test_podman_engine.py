"""What Podman does otherwise than Docker, on a real service. The whole contract is in
``tests/conformance/test_podman.py``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
from container_fixtures import Make

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.endpoint import Endpoint, find_endpoint
from paracle_sandbox.backends.machine.owner import Owner
from paracle_sandbox.backends.machine.process_isolation import read_posture
from paracle_sandbox.backends.registry import engine_client
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import ResourceLimitError, SandboxConflictError
from paracle_sandbox.images.builder import Images
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings, load_settings
from paracle_sandbox.testing.conformance import run_quick

OWNER = """
import asyncio, sys
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import load_settings

async def main():
    backend = DockerBackend(load_settings())
    sandbox = Sandbox(backend, sys.argv[1])
    await sandbox.start()
    print("up", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def engine() -> str:
    return "podman"


async def test_the_quick_part_of_the_contract(backend: DockerBackend) -> None:
    told: dict[str, str] = {}

    def report(name: str, ok: bool, detail: str) -> None:
        if not ok:
            told[name] = detail

    assert await run_quick(backend, report, SandboxConfig(cpu_cores=0.5, memory_mb=256)), told
    assert backend.engine.is_podman


async def test_images_are_listed_by_their_plain_names(backend: DockerBackend) -> None:
    """Podman says localhost/ before what comes from no registry."""
    async with engine_client(backend.settings) as client:
        answer = await client._query_json("images/json")
        assert any(name.startswith("localhost/") for i in answer for name in i["RepoTags"] or ())
        names = [image.name for image in await Images(client).list_images()]
    assert names == sorted(set(names))
    assert SandboxConfig().base_image in names


async def test_it_is_as_hardened(make: Make, backend: DockerBackend) -> None:
    """Asked of the kernel. Podman takes the filter as a file, and sets limits of its own."""
    sandbox = await make()
    posture = read_posture(backend.init_pid(sandbox.sandbox_id))
    assert posture.uids == (1000,) * 4 and not any(posture.capabilities)
    assert posture.no_new_privs == 1 and posture.seccomp == 2
    limits = Path(f"/proc/{backend.init_pid(sandbox.sandbox_id)}/limits").read_text()
    assert "Max open files            1024                 4096" in limits
    said = await backend.engine.inspect(f"paracle-sandbox-{sandbox.sandbox_id}")
    assert said["HostConfig"]["ReadonlyRootfs"] and said["HostConfig"]["PidsLimit"] == 256
    assert (await sandbox.execute("touch /etc/x"))["exit_code"] != 0


async def test_limits_are_told(make: Make) -> None:
    sandbox = await make(SandboxConfig(memory_mb=128, disk_mb=256))
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.run_code("x = bytearray(b'1') * (1 << 30)")
    assert caught.value.resource_type == "memory"
    sandbox = await make(SandboxConfig(disk_mb=256))
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.execute("head -c 300M /dev/zero >filled")
    assert caught.value.resource_type == "disk"


async def test_a_name_is_taken_once(backend: DockerBackend) -> None:
    """Podman says so with the status of an inner failure."""
    async with Sandbox(backend, "taken-once") as sandbox:
        for _ in range(2):
            with pytest.raises(SandboxConflictError):
                await backend.create("taken-once", sandbox.config, {})


def test_an_owner_that_is_killed_leaves_nothing(settings: Settings) -> None:
    env = {
        **os.environ, "DOCKER_HOST": engines.PODMAN_HOST, "PARACLE_STATE_DIR": settings.state_dir,
        "PARACLE_DATA_DIR": settings.data_dir,
    }  # fmt: skip
    name = f"killed-{os.urandom(4).hex()}"
    with subprocess.Popen([sys.executable, "-c", OWNER, name], env=env, text=True,
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        mine = f"label=paracle.owner={Owner.of(process.pid)}"

        def left() -> str:
            asked = ["docker", "ps", "-aq", "--filter", mine]
            return subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout

        assert left()
        os.kill(process.pid, signal.SIGKILL)
        assert oracles.wait_until(lambda: not left(), 15), left()


def test_its_sockets_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCKER_HOST as Podman's users set it, and the place where its service listens by default."""
    engines.require("podman")
    assert find_endpoint(load_settings({"DOCKER_HOST": engines.PODMAN_HOST})) == Endpoint(
        engines.PODMAN_HOST
    )
    monkeypatch.setattr(Path, "is_socket", lambda path: path == Path("/run/podman/podman.sock"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_endpoint(Settings()).url == "unix:///run/podman/podman.sock"


def test_what_the_service_may_give(settings: Settings) -> None:
    """A limit that it has itself; nothing is known of a socket where nobody listens."""
    limit = Endpoint(engines.PODMAN_HOST).process_limit
    assert limit is None or limit > 0
    assert Endpoint("unix:///nowhere").process_limit is None
    assert Endpoint("tcp://127.0.0.1:1").process_limit is None
