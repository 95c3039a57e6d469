"""A server that is killed or restarted under its sandboxes, and the script that starts servers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from incus_fixtures import CONFIG
from incus_private import PrivateServer, private_server
from test_faults_incus import dies_with

import engines
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.errors import BackendUnavailableError, SandboxExecutionError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def private() -> Iterator[PrivateServer]:
    with private_server() as server:
        yield server


async def _answers(backend: IncusBackend) -> None:
    for _ in range(300):
        try:
            await backend.server.get("/1.0")
            return
        except BackendUnavailableError:
            await asyncio.sleep(0.1)
    raise AssertionError("the server does not come back")


async def test_the_server_goes_and_comes_back(private: PrivateServer, tmp_path: Path) -> None:
    """R11: a definite error, soon; then everything works again, and nothing is there twice.

    Killed: one that is asked to end waits for what runs in its instances."""
    backend = IncusBackend(
        Settings(
            incus_socket=private.socket,
            incus_warm=0,
            state_dir=str(tmp_path / "state"),
            data_dir=str(tmp_path / "data"),
        )
    )
    sandbox = Sandbox(backend, "under-restart", CONFIG)
    await sandbox.start()

    async def end() -> None:
        os.kill(private.pid, signal.SIGKILL)

    error = await dies_with(sandbox, end)
    assert isinstance(error, SandboxExecutionError) and error.stdout == "begun\n"
    with pytest.raises(BackendUnavailableError, match="no server answers"):
        await backend.create("meanwhile", CONFIG, {})
    private.restart()
    await _answers(backend)
    await sandbox.stop()
    assert await backend.list_sandboxes() == []
    async with Sandbox(backend, "under-restart", CONFIG) as again:
        assert await again.run_command("echo again") == "again\n"
        assert [info.sandbox_id for info in await backend.list_sandboxes()] == ["under-restart"]
    await backend.close()


def test_the_script_clears_a_server_that_was_killed(private: PrivateServer) -> None:
    first = private.pid
    assert private.script("start", "incus").returncode == 0
    assert private.pid == first, "a second start is none"
    private.incus("launch", engines.INCUS_IMAGE, "left-behind")
    os.kill(first, signal.SIGKILL)
    assert private.script("status", "incus").returncode == 1
    assert private.script("start", "incus").returncode == 0
    assert private.incus("list", "-f", "csv").strip() == ""
    assert not list(Path("/sys/fs/cgroup").glob("*/lxc.*.left-behind"))
