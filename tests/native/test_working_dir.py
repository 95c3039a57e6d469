"""Working directories may have any name, and no other sandbox sees them."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from paracle_sandbox import SandboxConfig, SandboxCreationError, SandboxError
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.spawner_process import default_python
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hostile"))

from pressure import Scene, needs_root

pytestmark = needs_root

LOOK = (
    "ls -A / | tr '\\n' ' '; ls -A /.volume /.empty | wc -w; cut -d' ' -f5,6 /proc/self/mountinfo"
)


async def test_any_directory_that_is_not_the_systems():
    async with Scene() as scene:
        usual = await scene.sandbox()
        before = (await usual.execute(LOOK))["stdout"]
        for path in ("/app", "/data/deep/er", "/home", "/home/me", "/workspace/below"):
            if sys.base_prefix.startswith(path):
                continue  # refused: see below
            for read_only in (True, False):
                sandbox = await scene.sandbox(working_dir=path, read_only_filesystem=read_only)
                await sandbox.write_file("here", path)
                result = await sandbox.run_code("import os; print(os.getcwd(), os.listdir('.'))")
                assert result["stdout"] == f"{path} ['here']\n", result
                assert (await sandbox.read_file(f"{path}/here")) == path
        assert (await usual.execute(LOOK))["stdout"] == before


async def test_a_root_of_its_own_opens_nothing():
    async with Scene() as scene:
        usual, own = await scene.sandbox(), await scene.sandbox(working_dir="/app")
        ours, theirs = [(await one.execute(LOOK))["stdout"] for one in (usual, own)]
        names, *mounts = ours.splitlines()
        own_names, *own_mounts = theirs.splitlines()
        assert set(own_names.split()) - set(names.split()) == {"app"}
        writable = {line.split(" rw,")[0] for line in mounts if " rw," in line}
        own_writable = {line.split(" rw,")[0] for line in own_mounts if " rw," in line}
        assert own_writable == writable - {"/workspace"} | {"/app"}
        for place in ("/", "/workspace", "/etc", "/home", "/.empty", "/.volume", "/usr/bin"):
            result = await own.execute(["touch", f"{place}/x"])
            assert "Read-only file system" in result["stderr"], (place, result)


@pytest.mark.parametrize("path", ["/app", "/app/below"])
async def test_its_limit_is_that_of_any_other(path):
    async with Scene() as scene:
        sandbox = await scene.sandbox(working_dir=path, disk_mb=256)
        result = await sandbox.execute("df -P . | tail -1; head -c 20M /dev/zero > f")
        assert result["exit_code"] == 0
        assert 19 < (await sandbox.get_stats())["disk_mb"] < 24


@pytest.fixture
def python(tmp_path):
    """Provide an interpreter with a home of its own, below /tmp."""
    binary = tmp_path / "home" / "bin" / "python3"
    binary.parent.mkdir(parents=True)
    shutil.copy2(default_python(), binary)
    (tmp_path / "home" / "lib").symlink_to(f"{sys.base_prefix}/lib")
    return binary


def test_an_interpreter_that_would_be_hidden_is_refused(python, tmp_path):
    """Its library would be hidden, and a program that imports more than a little would fail."""
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the directory for temporary files is elsewhere")
    backend = NativeBackend(settings_of(tmp_path, python=str(python)))
    with pytest.raises(SandboxCreationError, match="PARACLE_PYTHON") as caught:
        asyncio.run(backend.create(new_sandbox_id(), SandboxConfig(), {}))
    assert caught.value.step == "interpreter"
    assert "a /tmp of its own" in str(caught.value)
    assert not asyncio.run(backend.health()).available


def test_so_is_a_working_directory_that_would_hide_it(tmp_path):
    place = str(Path(sys.base_prefix).parents[-2])
    if place == "/usr":
        pytest.skip("the interpreter is the system's, whose directories are refused anyway")
    backend = NativeBackend(settings_of(tmp_path))
    with pytest.raises(SandboxCreationError, match=f"a {place} of its own"):
        asyncio.run(backend.create(new_sandbox_id(), SandboxConfig(working_dir=place), {}))


def test_an_interpreter_that_is_not_there_is_told(tmp_path):
    backend = NativeBackend(settings_of(tmp_path, python="/no/such/python"))
    with pytest.raises(SandboxError, match="PARACLE_PYTHON does not run.*/no/such/python"):
        asyncio.run(backend.create(new_sandbox_id(), SandboxConfig(), {}))


def settings_of(folder, **options):
    return Settings(
        state_dir=str(folder / "state"), data_dir=str(folder / "data"), stock=0,
        template_build=False, **options,
    )  # fmt: skip
