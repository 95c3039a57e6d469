"""Working directories of any name, each in its own sandbox and seen by no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
