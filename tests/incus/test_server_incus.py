"""A server that is killed or restarted under its sandboxes, and the script that starts servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from incus_fixtures import CONFIG
from test_faults_incus import dies_with

import engines
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.errors import BackendUnavailableError, SandboxExecutionError
from paracle_sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

pytestmark = pytest.mark.timeout(300)
CACHE = Path(os.environ.get("PARACLE_TEST_CACHE", "/var/cache/paracle-sandbox-tests"))
INCUSD = "/usr/libexec/incus/incusd"


class PrivateServer:
    """One of its own, which may be killed."""

    def __init__(self, folder: Path) -> None:
        self.run_folder, self.cache = folder / "run", folder / "cache"
        self.cache.mkdir()
        for part in CACHE.glob("base-*.tar"):
            (self.cache / part.name).symlink_to(part)
        self.environment = {
            **os.environ,
            "PARACLE_TEST_RUN": str(self.run_folder),
            "PARACLE_TEST_CACHE": str(self.cache),
        }
        self.socket = str(self.run_folder / "incus/unix.socket")
        self.restarted: subprocess.Popen[bytes] | None = None

    def script(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [engines.SCRIPT, *words], env=self.environment, capture_output=True, text=True,
            check=False, timeout=200,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return int((self.run_folder / "incusd.pid").read_text())

    def restart(self) -> None:
        """With everything that it has, unlike the script, which begins anew."""
        with (self.run_folder / "incusd.log").open("a") as log:
            self.restarted = subprocess.Popen(
                [INCUSD, "--group", "root", "--logfile", f"{self.run_folder}/incusd-own.log"],
                env={**os.environ, "INCUS_DIR": str(self.cache / "incus")},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        (self.run_folder / "incusd.pid").write_text(str(self.restarted.pid))

    def remains(self) -> list[str]:
        here = str(self.cache.parent)
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found = [f"mount {line}" for line in mounts if here in line]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found += [f"process {line}"] if here in line else []
        return found + [f"file {path}" for path in self.run_folder.glob("*")]


@pytest.fixture
def private() -> Iterator[PrivateServer]:
    engines.require("incus")
    folder = Path(tempfile.mkdtemp(prefix="inc"))  # a short name: sockets have short paths
    folder.chmod(0o755)  # the root of an instance is nobody here
    server = PrivateServer(folder)
    started = server.script("start", "incus")
    assert started.returncode == 0, started.stderr
    yield server
    assert server.script("stop", "incus").returncode == 0
    if server.restarted is not None:
        server.restarted.wait(10)
    remains = server.remains()
    shutil.rmtree(folder)
    assert remains == []


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
    environment = {**os.environ, "INCUS_DIR": str(private.cache / "incus")}
    launch = ["incus", "launch", engines.INCUS_IMAGE, "left-behind"]
    subprocess.run(launch, env=environment, check=True, capture_output=True)
    os.kill(first, signal.SIGKILL)
    assert private.script("status", "incus").returncode == 1
    assert private.script("start", "incus").returncode == 0
    listed = subprocess.run(
        ["incus", "list", "-f", "csv"], env=environment, check=True, capture_output=True, text=True
    )
    assert listed.stdout.strip() == ""
    assert not list(Path("/sys/fs/cgroup").glob("*/lxc.*.left-behind"))
