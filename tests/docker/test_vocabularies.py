"""DockerSandbox and AsyncDockerizedTerminal: what programs written for either know them by."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import engines
from paracle_sandbox import (
    AsyncDockerizedTerminal,
    DockerSandbox,
    SandboxConfig,
    SandboxManager,
    SandboxSettings,
)
from paracle_sandbox.errors import (
    BackendUnavailableError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxTimeoutError,
)
from paracle_sandbox.testing.fake import FakeBackend


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    engines.require("docker")
    base = tmp_path_factory.mktemp("vocabularies")
    for name, value in {
        "DOCKER_HOST": engines.DOCKER_HOST, "PARACLE_STATE_DIR": f"{base}/state",
        "PARACLE_DATA_DIR": f"{base}/data", "PARACLE_VOLUMES": str(base),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
async def sandbox() -> AsyncIterator[DockerSandbox]:
    sandbox = await DockerSandbox(SandboxSettings(image="paracle/sandbox:latest")).create()
    yield sandbox
    await sandbox.cleanup()


async def test_started_by_id_and_config() -> None:
    """B4, B5, B7, B9."""
    sandbox = DockerSandbox("vocabulary-one", SandboxConfig(memory_mb=256))
    with pytest.raises(SandboxExecutionError, match="not started"):
        await sandbox.execute("true")
    await sandbox.start()
    names = docker("ps", "--format", "{{.Names}}").split()
    assert names.count("paracle-sandbox-vocabulary-one") == 1
    assert (await sandbox.container.show())["Config"]["Labels"]["paracle.managed"] == "true"
    assert (await sandbox.client.version())["Version"]
    result = await sandbox.execute("echo out; echo err >&2")
    assert (result["exit_code"], result["stdout"], result["stderr"]) == (0, "out\n", "err\n")
    assert result["timed_out"] is False
    stats = await sandbox.get_stats()
    assert stats["memory_limit_mb"] == 256 and stats["memory_mb"] > 0
    await sandbox.stop()
    assert sandbox.container is None
    await sandbox.stop()
    assert "vocabulary-one" not in docker("ps", "-a", "--format", "{{.Names}}")


async def test_a_runtime_by_name() -> None:
    sandbox = DockerSandbox("vocabulary-runtime", SandboxConfig(), runtime="runc")
    async with sandbox:
        assert (await sandbox.container.show())["HostConfig"]["Runtime"] == "runc"
    unknown = DockerSandbox("vocabulary-runtime", runtime="no-such-runtime")
    with pytest.raises(SandboxCreationError, match="does not know the runtime"):
        await unknown.start()
    await unknown.stop()
    with pytest.raises(BackendUnavailableError, match="native backend has no runtime"):
        DockerSandbox(backend="native", runtime="runc")
    with pytest.raises(ValueError, match="a runtime or a backend"):
        DockerSandbox(backend=FakeBackend(), runtime="runc")


async def test_the_default_is_a_paracle_image() -> None:
    assert DockerSandbox().config.base_image == "paracle/sandbox:latest"


async def test_the_image_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_SANDBOX_IMAGE", "python:3.12-slim")
    monkeypatch.setenv("DOCKER_SANDBOX_MEMORY", "300m")
    monkeypatch.setenv("DOCKER_SANDBOX_CPU", "0.5")
    config = DockerSandbox().config
    assert (config.base_image, config.memory_mb, config.cpu_cores) == ("python:3.12-slim", 300, 0.5)


async def test_where_it_works(sandbox: DockerSandbox) -> None:
    """B45, B46, B47: its directory, nested files, scripts that see them."""
    assert await sandbox.run_command("pwd") == "/workspace\n"
    await sandbox.write_file("deep/er/data.txt", "content")
    assert await sandbox.read_file("deep/er/data.txt") == "content"
    await sandbox.write_file("script.py", "print(open('deep/er/data.txt').read())")
    assert await sandbox.run_command("python3 script.py") == "content\n"


async def test_commands_follow_one_another(sandbox: DockerSandbox) -> None:
    """B49, B50, B61."""
    await sandbox.run_command("mkdir sub && cd sub && export NAME=value")
    assert await sandbox.run_command('pwd; echo "$NAME"') == "/workspace/sub\nvalue\n"
    with pytest.raises(SandboxTimeoutError):
        await sandbox.run_command("sleep 50", timeout=1)
    assert await sandbox.run_command("echo next") == "next\n"
    assert await sandbox.run_command("python3 -c 'print(42)'") == "42\n"
    tricky = "printf 'a\\n\\n$ \\necho $?\\n'"
    assert await sandbox.run_command(tricky) == "a\n\n$ \necho $?\n"
    assert await sandbox.run_command("printf '\\377'") == "�"


async def test_copies(sandbox: DockerSandbox, tmp_path: Path) -> None:
    """B52, B53."""
    (tmp_path / "in.txt").write_text("there and back")
    await sandbox.copy_to(tmp_path / "in.txt", "copied.txt")
    await sandbox.copy_from("copied.txt", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == "there and back"
    for missing in (sandbox.read_file("no"), sandbox.copy_from("no", tmp_path / "x")):
        with pytest.raises(FileNotFoundError, match="not found"):
            await missing
    with pytest.raises(ValueError, match="leaves"):
        sandbox._safe_resolve_path("../etc")
    assert sandbox._safe_resolve_path("a/b") == "/workspace/a/b"


async def test_bindings() -> None:
    """B51."""
    given = Path(os.environ["PARACLE_VOLUMES"]) / "given"
    given.mkdir()
    (given / "file").write_text("bound")
    async with DockerSandbox(None, {str(given): "/data"}) as sandbox:
        assert sandbox.volume_bindings == {str(given): "/data"}
        assert await sandbox.run_command("cat /data/file") == "bound"


async def test_an_image_that_is_not_there() -> None:
    """B8, B55."""
    sandbox = DockerSandbox(SandboxConfig(base_image="no-such-image:1"))
    with pytest.raises(SandboxCreationError, match="no-such-image:1"):
        await sandbox.create()
    assert sandbox.sandbox_id not in docker("ps", "-a", "--format", "{{.Names}}")
    await sandbox.cleanup()


async def test_a_terminal_in_a_sandbox(sandbox: DockerSandbox) -> None:
    """B48."""
    async with AsyncDockerizedTerminal(sandbox, env_vars={"GIVEN": "seen"}) as terminal:
        assert await terminal.run_command("echo $GIVEN; cd /tmp") == "seen"
        assert await terminal.run_command("pwd") == "/tmp"
        assert terminal.container.id and terminal.session is not None
    assert terminal.session is None


async def test_a_manager_has_sandboxes_of_this_kind() -> None:
    async with SandboxManager(backend="docker") as manager:
        config = SandboxConfig(base_image="python:3.12-slim", cpu_cores=0.5)
        sandbox = await manager.get_sandbox(await manager.create_sandbox(config))
        assert isinstance(sandbox, DockerSandbox) and sandbox.client is not None
        assert (await sandbox.container.show())["State"]["Running"]
        assert (
            sandbox.terminal is not None and sandbox.terminal.container.id == sandbox.container.id
        )
        await sandbox.run_command("cd /tmp; export SET=kept")
        assert await sandbox.run_command("echo $PWD $SET") == "/tmp kept\n"
        assert await sandbox.terminal.run_command("pwd") == "/tmp"
        named = sandbox.config
        assert (named.image, named.work_dir) == ("python:3.12-slim", "/workspace")
        assert (named.memory_limit, named.cpu_limit, named.timeout) == ("512m", 0.5, 300)
        assert not named.network_enabled


async def test_a_terminal_in_any_container() -> None:
    container = docker("run", "-d", "paracle/sandbox:latest", "sleep", "1000")
    try:
        terminal = AsyncDockerizedTerminal(container, "/tmp/work", {"GIVEN": "seen"}, 20)
        await terminal.init()
        assert await terminal.run_command("pwd; echo $GIVEN") == "/tmp/work\nseen"
        with pytest.raises(SandboxTimeoutError):
            await terminal.run_command("sleep 50", timeout=1)
        assert await terminal.run_command("cd /; pwd") == "/"
        assert (await terminal.run("exit 3"))["exit_code"] == 3
        await terminal.close()
        await terminal.close()
        assert docker("inspect", "-f", "{{.State.Running}}", container) == "true"
        left = docker("top", container).splitlines()[1:]
        assert len(left) == 1, f"the container is left as it was: {left}"
        with pytest.raises(SandboxExecutionError):
            await terminal.run_command("true")
    finally:
        docker("rm", "-f", container)
    for wrong in ("no-such-container", "../x", 7):
        with pytest.raises(SandboxError):
            await AsyncDockerizedTerminal(wrong).init()
