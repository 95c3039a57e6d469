"""What cannot be had is an error that names it and the remedy, and nothing is left behind."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import oracles
import pytest
from container_fixtures import Make, changed

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.endpoint import find_endpoint, no_engine
from paracle_sandbox.backends.docker.engine import EngineRefused
from paracle_sandbox.backends.docker.errors import creation_error
from paracle_sandbox.backends.docker.gvisor import GvisorBackend
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    BackendUnavailableError,
    DockerConnectionError,
    SandboxCreationError,
    SandboxPathError,
)
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.service.errors import classify, status_of
from paracle_sandbox.settings import Settings


async def refusal(backend: DockerBackend, config: SandboxConfig | None = None) -> str:
    sandbox = Sandbox(backend, "refused", config)
    with pytest.raises(SandboxCreationError) as caught:
        await sandbox.start()
    return str(caught.value)


# No engine


def test_not_installed_and_not_running_are_told_apart() -> None:
    nothing = str(no_engine(lambda name: None))
    asleep = str(no_engine(lambda name: "/usr/bin/docker" if name == "docker" else None))
    assert nothing.startswith("Docker not available: it is not installed. Install Docker")
    assert asleep.startswith("Docker not available: the Docker daemon is not running. Start it")


async def test_an_address_where_nobody_is(tmp_path: Path) -> None:
    for prepared in (False, True):
        if prepared:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(tmp_path / "sock"))
        backend = DockerBackend(Settings(docker_host=f"unix://{tmp_path}/sock"))
        with pytest.raises(DockerConnectionError) as caught:
            await backend.create("x", SandboxConfig(), {})
        assert "Docker not available: the Docker daemon is not running" in str(caught.value)
        assert "systemctl start docker" in str(caught.value)
        health = await backend.health()
        assert not health.available and "not running" in health.detail
        await backend.close()


async def test_no_permission(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("/tmp/paracle-test-forbidden.sock")
        try:
            os.chmod("/tmp/paracle-test-forbidden.sock", 0o600)
            server.listen()
            program = (
                "import os; os.setgid(65534); os.setuid(65534)\n"
                "import asyncio\n"
                "from paracle_sandbox.backends.docker.backend import DockerBackend\n"
                "from paracle_sandbox.settings import Settings\n"
                "url = 'unix:///tmp/paracle-test-forbidden.sock'\n"
                "print(asyncio.run(DockerBackend(Settings(docker_host=url)).health()).detail)\n"
            )
            done = subprocess.run([sys.executable, "-c", _imports() + program], text=True,
                                  capture_output=True, timeout=60, check=True)  # fmt: skip
        finally:
            os.unlink("/tmp/paracle-test-forbidden.sock")
    assert "Docker not available: no permission to use" in done.stdout
    assert "usermod -aG docker" in done.stdout


def _imports() -> str:
    """Everything is imported before the program gives up its rights."""
    return (
        "import aiodocker, aiohttp, yarl, aiodocker.stream\n"
        "import paracle_sandbox.backends.docker.backend\n"
        "import paracle_sandbox.backends.docker.health\n"
    )


def test_a_missing_library_names_the_line_to_type() -> None:
    program = (
        "import sys; sys.modules['aiodocker'] = None\n"
        "import asyncio\n"
        "from paracle_sandbox.backends.docker.backend import DockerBackend\n"
        "from paracle_sandbox.settings import Settings\n"
        "backend = DockerBackend(Settings(docker_host='unix:///nowhere'))\n"
        "print(asyncio.run(backend.health()).detail)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert "pip install '.[docker]'" in done.stdout


def test_where_the_engine_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(find_endpoint(Settings(docker_host="tcp://engine:1"))) == "tcp://engine:1"
    assert find_endpoint(Settings(docker_context="far")).context == "far"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text('{"currentContext": "chosen"}')
    assert find_endpoint(Settings()).context == "chosen"
    assert find_endpoint(Settings(docker_host="unix:///x")).socket_path == "/x"


async def test_a_context_of_the_docker_client(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    subprocess.run(
        ["docker", "context", "create", "tests", "--docker", f"host={engines.DOCKER_HOST}"],
        check=True, capture_output=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    by_name = changed(settings, docker_host=None, docker_context="tests")
    backend = DockerBackend(by_name)
    assert (await backend.engine.version())["ApiVersion"]
    assert backend.engine.endpoint.shares_our_files, "it is the same socket"
    await backend.close()
    monkeypatch.setenv("HOME", "/nonexistent")
    elsewhere = changed(by_name, docker_config=f"{tmp_path}/.docker")
    assert str(find_endpoint(elsewhere)) == engines.DOCKER_HOST


# Images


async def test_a_missing_image_names_what_to_type(backend: DockerBackend) -> None:
    said = await refusal(backend, SandboxConfig(base_image="paracle/sandbox:no-such"))
    assert said.startswith("Image not found: paracle/sandbox:no-such (")
    assert "There are paracle/sandbox:latest, paracle/sandbox:dev" in said
    said = await refusal(backend, SandboxConfig(base_image="no-such-image:1"))
    assert "docker pull no-such-image:1. Or choose another base_image." in said


@pytest.mark.parametrize(
    ("image", "command"),
    [
        ("paracle/sandbox", "Build it with: paracle image build sandbox."),
        ("paracle/sandbox:latest", "Build it with: paracle image build sandbox."),
        ("localhost/paracle/sandbox:ml", "Build it with: paracle image build ml."),
        ("paracle/sandbox:1.0", "build one with: paracle image build VARIANT."),
        ("ghcr.io/paracle/sandbox:ml", "docker pull ghcr.io/paracle/sandbox:ml."),
        ("host:5000/paracle/sandbox", "docker pull host:5000/paracle/sandbox."),
    ],
)
def test_only_what_can_be_built_has_a_build_command(image: str, command: str) -> None:
    error = creation_error(
        EngineRefused(404, "No such image: x"), "x", SandboxConfig(base_image=image)
    )
    assert command in str(error) and error.step == "image"
    assert ("paracle image build" in str(error)) == ("paracle image build" in command)


async def test_an_image_without_python(backend: DockerBackend) -> None:
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as tar:
        for name in ("bin", "tmp", "etc", "proc", "dev", "sys", "workspace"):
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
    subprocess.run(["docker", "import", "-", "paracle-test/empty:1"], input=empty.getvalue(),
                   check=True, capture_output=True, env=docker_env())  # fmt: skip
    try:
        said = await refusal(backend, SandboxConfig(base_image="paracle-test/empty:1"))
    finally:
        subprocess.run(["docker", "rmi", "paracle-test/empty:1"], capture_output=True,
                       env=docker_env(), check=False)  # fmt: skip
    assert "has no python3, which the guest needs" in said
    error = creation_error(EngineRefused(400, 'exec: "python3": not found'), "x", SandboxConfig())
    assert (status_of(error), classify(error).retryable) == (400, False), "it stays so"
    assert "refused" not in {info.sandbox_id for info in await backend.list_sandboxes()}


def docker_env() -> dict[str, str]:
    return {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}


# Runtimes


async def test_an_unknown_runtime(settings: Settings) -> None:
    backend = DockerBackend(settings, runtime="no-such-runtime")
    assert "does not know the runtime" in await refusal(backend)
    await backend.close()


async def test_a_runtime_by_name(settings: Settings) -> None:
    backend = DockerBackend(changed(settings, docker_runtime="runc"))
    async with Sandbox(backend, "by-name") as sandbox:
        assert await sandbox.run_command("echo hello") == "hello\n"
        said = await backend.engine.inspect("paracle-sandbox-by-name")
        assert said["HostConfig"]["Runtime"] == "runc"
    await backend.close()


def test_gvisor_keeps_to_its_own_runtimes() -> None:
    """The setting is meant for docker as well."""
    named = {"crun": "runsc", "runsc-kvm": "runsc-kvm"}
    for name, runtime in named.items():
        settings = Settings(docker_runtime=name)
        assert GvisorBackend(settings).runtime == runtime
        assert DockerBackend(settings).runtime == name
    assert GvisorBackend(Settings(), runtime="mine").runtime == "mine"


def test_a_gvisor_that_has_no_network_names_the_flag() -> None:
    """What such a build says, with any network and with none."""
    said = (
        "OCI runtime start failed: starting container: setting up network: creating interfaces "
        'from net namespace "/proc/9645/ns/net": cannot run with network enabled in root network '
        "namespace: unknown"
    )
    error = creation_error(EngineRefused(400, said), "x", SandboxConfig())
    assert isinstance(error, BackendUnavailableError) and error.step == "runtime"
    assert '"--network=host" in its runtimeArgs' in str(error)


@pytest.mark.case("O05")
async def test_what_is_not_gvisor_is_refused(settings: Settings) -> None:
    backend = GvisorBackend(settings, runtime="runc")
    sandbox = Sandbox(backend, "not-gvisor")
    with pytest.raises(BackendUnavailableError, match="not under gVisor: its process is python3"):
        await sandbox.start()
    assert "not-gvisor" not in {info.sandbox_id for info in await backend.list_sandboxes()}
    await backend.close()


@pytest.mark.case("O05")
async def test_also_from_inside(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine elsewhere tells nothing of its processes: the kernel inside has to."""
    monkeypatch.setattr("paracle_sandbox.backends.docker.gvisor._not_runsc", lambda *_: "")
    backend = GvisorBackend(settings, runtime="runc")
    with pytest.raises(BackendUnavailableError, match="not under gVisor: its kernel says"):
        await Sandbox(backend, "not-gvisor").start()
    await backend.close()


# Volumes


async def test_volumes_are_read_only_unless_asked_for(make: Make, settings: Settings) -> None:
    given = Path(settings.volumes[0])
    (given / "shared").mkdir(parents=True)
    given.chmod(0o755)
    (given / "shared").chmod(0o777)
    (given / "shared/file").write_text("of the host")
    source = str(given / "shared")
    sandbox = await make(SandboxConfig(volumes={source: "/data"}))
    assert await sandbox.run_command("cat /data/file") == "of the host"
    assert (await sandbox.execute("echo x >/data/file"))["exit_code"] != 0
    writable = await make(SandboxConfig(volumes={source: "/data:rw"}))
    await writable.execute("echo new >/data/made")
    assert (given / "shared/made").read_text() == "new\n"


async def test_file_calls_reach_volumes_and_nothing_beside_them(
    make: Make, settings: Settings
) -> None:
    given = Path(settings.volumes[0])
    (given / "shared").mkdir(parents=True)
    given.chmod(0o755)
    (given / "shared").chmod(0o777)
    (given / "shared/file").write_text("of the host")
    (given / "shared/file").chmod(0o666)
    (given / "shared/out").symlink_to("/etc")
    source = str(given / "shared")
    sandbox = await make(SandboxConfig(volumes={source: "/data"}))
    assert await sandbox.read_file("/data/file") == "of the host"
    for path in ("/data/file", "/data/new"):
        with pytest.raises(PermissionError, match="Read-only"):
            await sandbox.write_file(path, "x")
    for path in ("/data/out/passwd", "/data/../etc/passwd", "/database"):
        with pytest.raises(SandboxPathError):
            await sandbox.read_file(path)
    writable = await make(SandboxConfig(volumes={source: "/data:rw"}))
    await writable.write_file("/data/made", "x")
    assert (given / "shared/made").read_text() == "x"
    assert (given / "shared/file").read_text() == "of the host"


async def test_volumes_outside_the_allow_list_are_refused(
    backend: DockerBackend, settings: Settings, tmp_path: Path
) -> None:
    allowed = Path(settings.volumes[0])
    allowed.mkdir(parents=True)
    (allowed / "way-out").symlink_to("/etc")
    for source in ("/etc", str(tmp_path), str(allowed / "way-out"), f"{allowed}-beside", "/"):
        config = SandboxConfig(volumes={source: "/data"})
        assert "is not allowed" in await refusal(backend, config)
    config = SandboxConfig(volumes={str(allowed / "missing"): "/data"})
    assert "is not there" in await refusal(backend, config)
    for target in ("data", "/", "/etc/x", "/proc", "/data/../etc", "/usr"):
        with pytest.raises(ValueError, match="path|nothing of the host"):
            SandboxConfig(volumes={"/srv/x": target})


@pytest.mark.case("F17")
async def test_a_volume_that_is_replaced_after_the_check(
    backend: DockerBackend, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who can write above it puts a link in its place just before the engine looks."""
    allowed, canary = Path(settings.volumes[0]), oracles.Canary(tmp_path / "secret" / "canary")
    (allowed / "shared").mkdir(parents=True)
    create, made = backend.engine.create, []

    async def replaced_first(name: str, body: dict[str, Any]) -> str:
        container = create(name, body)
        if str(allowed / "shared") in str(body):
            (allowed / "shared").rename(allowed / "away")
            (allowed / "shared").symlink_to(canary.path.parent)
            made.append(await container)
            return made[-1]
        return await container

    monkeypatch.setattr(backend.engine, "create", replaced_first)
    config = SandboxConfig(volumes={str(allowed / "shared"): "/data:rw"})
    assert "volume" in await refusal(backend, config)
    assert len(made) == 1, "it was not replaced in time: this shows nothing"
    with pytest.raises(EngineRefused):
        await backend.engine.inspect(made[0])
    canary.assert_intact()


@pytest.mark.case("F17")
async def test_others_have_no_volumes(settings: Settings) -> None:
    """Nothing of the host is mounted there by name, so nothing can be put in its place."""
    Path(settings.volumes[0]).mkdir(parents=True)
    config = SandboxConfig(volumes={settings.volumes[0]: "/data"})
    native = NativeBackend(settings)
    with pytest.raises(SandboxCreationError, match="volumes"):
        await native.create("with-volumes", config, {})
    await native.close()


async def test_volume_bindings_of_the_manager(backend: DockerBackend, settings: Settings) -> None:
    given = Path(settings.volumes[0])
    given.mkdir(parents=True)
    (given / "hello.txt").write_text("hello")
    async with SandboxManager(backend=backend) as manager:
        sandbox_id = await manager.create_sandbox(volume_bindings={str(given): "/data"})
        sandbox = await manager.get_sandbox(sandbox_id)
        assert await sandbox.run_command("cat /data/hello.txt") == "hello"
        with pytest.raises(SandboxCreationError, match="not allowed"):
            await manager.create_sandbox(volume_bindings={"/etc": "/data"})


async def test_host_network_is_named_unsafe(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as server:
        sandbox = await make(SandboxConfig(network_mode="host"))
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})); print('reached')"
        assert (await sandbox.run_code(code))["stdout"] == "reached\n"
    assert any("unsafe" in record.message for record in caplog.records)
