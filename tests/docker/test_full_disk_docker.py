"""A host disk that was full for a moment: the containers on its volume are lost for writing, and
can be removed; the next are on another volume."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_fixtures import Make

from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.errors import ResourceLimitError
from paracle_sandbox.jail import kernel
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings


@pytest.fixture(autouse=True)
def disk(settings: Settings) -> Iterator[Path]:
    """Small, and where the engine sees it."""
    path = Path(settings.data_dir)
    path.mkdir()
    kernel.mount("tmpfs", str(path), "tmpfs", 0, "size=640m")
    yield path
    kernel.umount(str(path))


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


async def write(sandbox: Sandbox, mib: int) -> str:
    sync = "import os; os.fsync(os.open('big', os.O_WRONLY))"
    command = f'head -c {mib}M /dev/zero >big && python3 -c "{sync}"'
    with contextlib.suppress(ResourceLimitError):
        return str((await sandbox.execute(f"{command} && echo written", timeout=60))["stdout"])
    return "refused"


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_the_next_containers_can_write(
    make: Make, backend: DockerBackend, disk: Path
) -> None:
    first = await make()
    assert await write(first, 10) == "written\n"
    lost = await backend.store.get()
    assert lost is not None
    fill(disk / "ballast")
    await write(first, 200)  # gVisor tells its programs nothing of what became of it
    # Have the kernel write down what the volume holds, which it cannot.
    subprocess.run(["sync", "-f", lost.path], capture_output=True, check=False)
    assert os.statvfs(lost.path).f_flag & os.ST_RDONLY
    (disk / "ballast").unlink()

    second = await make()
    assert await write(second, 100) == "written\n"
    assert not backend.store.why_in_memory
    assert (await first.execute("echo lives"))["stdout"] == "lives\n"
    await first.stop()  # which fails when something of it is left
    assert lost.ended, "with its last sandbox"
