"""An engine that is not of this machine: nothing is shared with it but its API, over TCP.

The engine of the tests stands in for it, behind a relay. What the backend could learn from the
files and processes of its machine it does not look for then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from container_fixtures import BACKENDS, Make, changed

import engines
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import ResourceLimitError, SandboxCreationError
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.conformance import all_checks, run_check

TESTS = Path(__file__).resolve().parents[1]
CLIENT = """
import asyncio
from paracle_sandbox import SandboxConfig, SandboxManager
from paracle_sandbox.errors import SandboxCreationError, SandboxError

async def main():
    async with SandboxManager() as manager:
        sandbox = await manager.create(SandboxConfig(disk_mb=256, memory_mb=512))
        print((await sandbox.run_code("open('a.txt', 'w').write('kept'); print(6 * 7)"))["stdout"],
              end="")
        print(await sandbox.read_file("a.txt"))
        print((await sandbox.get_stats())["memory_mb"] > 0)
        print([info.sandbox_id for info in await manager.backend.list_sandboxes()
               if info.sandbox_id == sandbox.sandbox_id] == [sandbox.sandbox_id])
        try:
            await manager.create(SandboxConfig(network_mode="bridge"))
        except SandboxError as error:
            print(error)
    print((await manager.backend.health()).available)

asyncio.run(main())
"""
SMALL = SandboxConfig(disk_mb=256, memory_mb=1024, timeout_seconds=100)
# What the disk limit promises, and what is told of it.
CHECKS = (
    "limits.too_much_disk",
    "limits.too_much_disk_from_the_host",
    "limits.temporary_files_count",
    "lifecycle.usage_grows",
)


class Relay:
    """Passes each connection on to the engine. The end of either side is the end of both."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass(reader, writer))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(engines.SOCKET)
        ways = [asyncio.ensure_future(_pump(*way)) for way in ((reader, back), (there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (back, writer):
                end.transport.abort()
            await asyncio.wait(ways)

    async def close(self) -> None:
        for task in list(self._under_way):
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await asyncio.sleep(0)  # the loop lets go of what was aborted


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(1 << 16):
            target.write(piece)
            await target.drain()


@pytest.fixture
async def address(engine: str) -> AsyncIterator[str]:
    engines.require(engine)
    passing = Relay()
    async with await asyncio.start_server(passing.accept, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await passing.close()


@pytest.fixture
async def backend(engine: str, settings: Settings, address: str) -> AsyncIterator[DockerBackend]:
    backend = BACKENDS[engine](changed(settings, docker_host=address))
    yield backend
    assert not [one for one in await backend.list_sandboxes() if one.owner_pid == os.getpid()]
    await backend.close()
    assert not Path(settings.state_dir, "store-0").exists()


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_a_full_disk_is_told(make: Make, backend: DockerBackend) -> None:
    sandbox = await make(SMALL)
    assert (
        await backend.store.get() is None and "not of this machine" in backend.store.why_in_memory
    )
    for place in ("filled", "/tmp/filled"):
        with pytest.raises(ResourceLimitError) as caught:
            await sandbox.execute(f"head -c 300M /dev/zero >{place}")
        assert caught.value.resource_type == "disk" and caught.value.limit == 256 << 20
        assert caught.value.usage >= 250 << 20
        with pytest.raises(ResourceLimitError):
            await sandbox.check_limits()
        await sandbox.remove(place)
    # A failure that has nothing to do with it is none.
    assert (await sandbox.execute("exit 3"))["exit_code"] == 3
    assert (await sandbox.get_stats())["disk_mb"] < 1


async def test_files_without_number_are_a_full_disk_too(make: Make) -> None:
    sandbox = await make(SMALL)
    code = "import os\nfor n in range(100000): open(f'f{n}', 'w').close()"
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.run_code(code)
    assert caught.value.resource_type == "disk"


async def test_programs_cannot_stop_who_tells(make: Make) -> None:
    sandbox = await make(SMALL)
    await sandbox.get_stats()
    await sandbox.execute("kill -9 -1; python3 -c 'import os; os.kill(-1, 9)'")
    with pytest.raises(ResourceLimitError):
        await sandbox.execute("head -c 300M /dev/zero >filled")
    await sandbox.remove("filled")
    teller = "for p in /proc/[0-9]*; do grep -qs f_blo[c]ks $p/cmdline && kill -9 ${p#/proc/}; done"
    assert "not permitted" in (await sandbox.execute(teller))["stderr"]


async def test_the_contract_of_the_disk(backend: DockerBackend) -> None:
    checks = {check.name: check for check in all_checks()}
    for name in CHECKS:
        await run_check(checks[name], backend, frozenset({"usage", "disk"}))


async def test_its_folders_are_not_ours_to_give(backend: DockerBackend, settings: Settings) -> None:
    Path(settings.volumes[0]).mkdir(parents=True)
    config = SandboxConfig(volumes={settings.volumes[0]: "/data"})
    with pytest.raises(SandboxCreationError, match="paths of the engine's machine"):
        await backend.create("x", config, {})


async def client(system: str, address: str, folder: Path) -> list[str]:
    """What a program prints on a system without Linux that has an engine at that address."""
    packages = "aiodocker.stream"  # others have what aiohttp wants
    program = f"import elsewhere; elsewhere.become({system!r}, {packages!r})\n{CLIENT}"
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
        "HOME": str(folder),
        "PARACLE_STATE_DIR": str(folder / "state"),
        "SANDBOX_MODE": "docker",
        "DOCKER_HOST": address,
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(120):
        said, complaints = await child.communicate()
    assert child.returncode == 0, complaints.decode()
    return said.decode().splitlines()


WORKED = ["42", "kept", "True", "True"]


@pytest.mark.parametrize("system", ["macos", "windows"])
@pytest.mark.parametrize("engine", ["docker"])
async def test_a_client_without_linux(system: str, address: str, tmp_path: Path) -> None:
    said = await client(system, address, tmp_path)
    assert said[:4] == WORKED
    assert said[4].startswith("network_mode=bridge needs root on the machine of the engine. ")
    assert said[5:] == ["True"]


@pytest.mark.parametrize("engine", ["docker"])
async def test_an_engine_on_a_mac_has_a_socket(engine: str, tmp_path: Path) -> None:
    engines.require(engine)
    said = await client("macos", f"unix://{engines.SOCKET}", tmp_path)
    assert said[:4] == WORKED and said[5:] == ["True"]


async def test_windows_opens_no_socket(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="npipe:////./pipe/docker_engine or to tcp"):
        await client("windows", f"unix://{tmp_path}/sock", tmp_path)
