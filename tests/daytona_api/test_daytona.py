"""The daytona backend against a stand-in of its API: what is asked, and what works then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("daytona", reason="uses its SDK: pip install '.[daytona]'")
from stand_in import KEY, StandIn, stand_in  # noqa: E402

from paracle_sandbox import (  # noqa: E402
    BackendUnavailableError,
    Sandbox,
    SandboxConfig,
    SandboxConflictError,
    SandboxCreationError,
    SandboxManus,
    SandboxNotFoundError,
    SandboxTimeoutError,
    Settings,
)
from paracle_sandbox.backends import daytona  # noqa: E402
from paracle_sandbox.backends.daytona import DaytonaBackend, DaytonaWorkspaces  # noqa: E402
from paracle_sandbox.backends.registry import get_backend  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:daytona.*")


@pytest.fixture
async def api() -> AsyncIterator[StandIn]:
    async with stand_in() as server:
        yield server


def settings(api: StandIn) -> Settings:
    return Settings(daytona_key=KEY, daytona_url=api.url, daytona_target="us")


@pytest.fixture
async def backend(api: StandIn) -> AsyncIterator[DaytonaBackend]:
    backend = get_backend("daytona", settings(api))
    assert isinstance(backend, DaytonaBackend)
    yield backend
    await backend.close()


async def test_what_is_asked_for(api: StandIn, backend: DaytonaBackend) -> None:
    config = SandboxConfig(cpu_cores=1.5, memory_mb=1500, disk_mb=3000)
    await backend.create("sb-1", config, {"team": "blue"})
    body = next(body for method, path, body in api.asked if (method, path) == ("POST", "/sandbox"))
    assert body["name"] == "sb-1" and body["public"] is False
    assert body["networkBlockAll"] is True and body["autoDeleteInterval"] == 0
    assert (body["cpu"], body["memory"], body["disk"]) == (2, 2, 3)
    assert body["labels"]["team"] == "blue" and body["labels"]["paracle-sandbox"] == "sb-1"
    assert "python:3.12-slim" in body["buildInfo"]["dockerfileContent"]
    [info] = await backend.list_sandboxes()
    assert info.sandbox_id == "sb-1" and info.backend == "daytona" and info.created_at > 0
    with pytest.raises(SandboxConflictError):
        await backend.create("sb-1", config, {})
    await backend.destroy("sb-1")
    await backend.destroy("sb-1")
    assert not api.sandboxes
    with pytest.raises(SandboxNotFoundError):
        await backend.connect("sb-1")


async def test_a_sandbox_as_any_other(
    api: StandIn, backend: DaytonaBackend, tmp_path: Path
) -> None:
    async with Sandbox(backend, "sb-2", SandboxConfig(env_vars={"WHO": "world"})) as sandbox:
        result = await sandbox.execute("echo hello $WHO; pwd; echo err >&2; exit 3")
        assert result["stdout"] == "hello world\n/workspace\n" and result["stderr"] == "err\n"
        assert result["exit_code"] == 3
        assert (await sandbox.run_code("print(6 * 7)"))["stdout"] == "42\n"
        every_byte = bytes(range(256)) * 500
        await sandbox.write_file("bytes", every_byte)
        assert await sandbox.read_bytes("bytes") == every_byte
        await sandbox.copy_from("bytes", tmp_path / "bytes")
        assert (tmp_path / "bytes").read_bytes() == every_byte
        with pytest.raises(SandboxTimeoutError):
            await sandbox.execute("sleep 60", timeout=0.5)
        assert (await sandbox.execute("echo still here"))["stdout"] == "still here\n"
        assert (await sandbox.get_stats())["memory_bytes"] >= 0
    assert not api.sandboxes


async def test_health(api: StandIn) -> None:
    backend = DaytonaBackend(settings(api))
    assert (await backend.health()).available
    await backend.close()
    wrong = DaytonaBackend(Settings(daytona_key="wrong", daytona_url=api.url))
    assert not (await wrong.health()).available
    await wrong.close()
    missing = await DaytonaBackend(Settings()).health()
    assert not missing.available and "DAYTONA_API_KEY" in missing.detail


async def test_creation_that_fails_leaves_nothing(api: StandIn, backend: DaytonaBackend) -> None:
    api.fail_create = True
    with pytest.raises(SandboxCreationError, match="no capacity"):
        await backend.create("sb-3", SandboxConfig(), {})
    assert not api.sandboxes


async def test_desktops(api: StandIn) -> None:
    desktops = DaytonaWorkspaces("desktop:1", settings(api))
    try:
        sandbox = await desktops.create_sandbox()
        [body] = [body for _, path, body in api.asked if path == "/sandbox"]
        password = body["env"]["VNC_PASSWORD"]
        assert len(password) >= 12 and desktops.passwords[sandbox.id] == password
        assert body["public"] is False and (body["cpu"], body["memory"], body["disk"]) == (2, 4, 5)
        [command] = [b for _, path, b in api.asked if path.endswith("/exec")]
        assert "supervisord -n" in command["command"]
        links = await desktops.preview_links(sandbox)
        assert links == {"vnc": "https://6080-signed.example",
                         "website": "https://8080-signed.example"}  # fmt: skip
        api.sandboxes[sandbox.id]["state"] = "stopped"
        again = await desktops.get_or_start_sandbox(sandbox.id)
        assert again.id == sandbox.id and any(p.endswith("/start") for _, p, _ in api.asked)
        given = await desktops.create_sandbox("s3cret", project_id="p1")
        assert api.sandboxes[given.id]["env"]["VNC_PASSWORD"] == "s3cret"
        assert api.sandboxes[given.id]["labels"]["id"] == "p1"
        await desktops.delete_sandbox(sandbox.id)
        await desktops.delete_sandbox(sandbox.id)
        await desktops.delete_sandbox(given.id)
        assert not api.sandboxes
        with pytest.raises(SandboxNotFoundError):
            await desktops.get_or_start_sandbox("none")
    finally:
        await desktops.close()


async def test_desktops_as_functions(api: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    monkeypatch.setenv("DAYTONA_API_URL", api.url)
    monkeypatch.setenv("DAYTONA_SANDBOX_IMAGE", "desktop:2")
    try:
        sandbox = await daytona.create_sandbox(project_id="p1")
        [body] = [body for _, path, body in api.asked if path == "/sandbox"]
        assert "desktop:2" in body["buildInfo"]["dockerfileContent"]
        assert body["labels"]["id"] == "p1" and sandbox.env["VNC_PASSWORD"]
        assert sandbox.env["VNC_PASSWORD"] == body["env"]["VNC_PASSWORD"]
        api.sandboxes[sandbox.id]["state"] = "stopped"
        again = await daytona.get_or_start_sandbox(sandbox.id)
        await daytona.start_supervisord_session(again)
        assert len([path for _, path, _ in api.asked if path.endswith("/exec")]) == 3
        await daytona.delete_sandbox(sandbox.id)
        await daytona.delete_sandbox(sandbox.id)
        assert not api.sandboxes
    finally:
        await daytona.close_workspaces()
    await daytona.close_workspaces()


def test_names_are_there_without_the_sdk() -> None:
    program = f"""
import sys
from paracle_sandbox.backends import daytona
assert not any("daytona." in name for name in sys.modules), "nothing until it is used"
from paracle_sandbox.backends.daytona import {", ".join(daytona.__all__)}
print("daytona" in sys.modules)
"""
    assert all(getattr(daytona, name) for name in daytona.__all__) and dir(daytona)
    with pytest.raises(AttributeError):
        daytona.no_such_name  # noqa: B018
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip
    assert done.stdout == "False\n"


async def test_an_agent_deletes_its_sandbox_there(api: StandIn, backend: DaytonaBackend) -> None:
    agent = await SandboxManus.create(backend=backend, name="far")
    try:
        assert (await agent.execute_code("print(42)"))["stdout"] == "42\n"
        [there] = api.sandboxes.values()
        assert there["labels"]["agent"] == "far" and there["public"] is False
    finally:
        await agent.cleanup()
    assert not api.sandboxes


def test_the_sdk_is_not_needed_to_start() -> None:
    program = """
import sys
sys.modules["daytona"] = None
from paracle_sandbox import BackendUnavailableError, Settings
from paracle_sandbox.backends.registry import get_backend
backend = get_backend("daytona", Settings(daytona_key="k"))
try:
    backend.client
except BackendUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip
    assert "pip install '.[daytona]'" in done.stdout


def test_a_key_is_needed() -> None:
    with pytest.raises(BackendUnavailableError, match="DAYTONA_API_KEY"):
        _ = DaytonaBackend(Settings()).client
