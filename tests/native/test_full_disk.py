"""After the host's disk was full for a moment, its sandboxes cannot write any more, and new ones
can.

The volume, of a spawner or of the workspaces of container engines, is on a small file system in a
mount namespace of the test's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paracle_sandbox.jail.limits.shared_space import Space

MIB = 1 << 20
needs_volumes = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control"),
    reason="volumes need root and loop devices: run as root, modprobe loop",
)

_DISK = """
import asyncio, os, sys
from paracle_sandbox.jail import kernel
from paracle_sandbox.settings import Settings

kernel.unshare(kernel.CLONE_NEWNS)
kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
disk = sys.argv[1] + "/disk"
os.mkdir(disk)
kernel.mount("tmpfs", disk, "tmpfs", 0, "size=640m")

def fill():
    with open(disk + "/ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(1 << 20))
        except OSError:
            pass
"""

_PROGRAM = """
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import ResourceLimitError
from paracle_sandbox.sandbox.sandbox import Sandbox

async def write(sandbox, mib):
    command = f"head -c {mib}M /dev/zero >big && sync big && echo written"
    try:
        return (await sandbox.execute(command, timeout=60))["stdout"]
    except ResourceLimitError:
        return "refused"

async def main():
    backend = NativeBackend(Settings(state_dir=sys.argv[1] + "/state", data_dir=disk,
                                     template_build=False, stock=1))
    first = Sandbox(backend, "first")
    await first.start()
    assert await write(first, 10) == "written\\n"
    spawners = [backend._owned["first"].spawner]
    assert spawners[0].posture["volume"]
    fill()
    assert await write(first, 200) != "written\\n"
    await backend.exact_usage("first")  # writes down what the volume holds, which fails

    # While it is full there is no other volume to be had, and that is said.
    second = Sandbox(backend, "second")
    await second.start()
    spawners.append(backend._owned["second"].spawner)
    assert "full" in spawners[1].posture["volume_note"], spawners[1].posture
    assert "disk limit apart from memory" in backend.lacking()
    assert (await first.execute("echo lives"))["stdout"] == "lives\\n"

    # And when there is room again there is one.
    os.unlink(disk + "/ballast")
    await first.stop()
    third = Sandbox(backend, "third")
    await third.start()
    spawners.append(backend._owned["third"].spawner)
    assert spawners[2].posture["volume"], spawners[2].posture
    assert await write(third, 100) == "written\\n"
    assert [one.closed for one in spawners] == [True, False, False], "with its last sandbox"
    await second.stop()
    await third.stop()
    assert [one.closed for one in spawners] == [True, True, False]
    await backend.close()
    assert os.listdir(sys.argv[1] + "/state") == ["instances"]
    print("done")

asyncio.run(main())
"""


_WORKSPACES = """
import subprocess
from paracle_sandbox.backends.machine.workspaces import WorkspaceStore

def write(path, mib):
    try:
        with open(path + "/workspace/big", "wb") as file:
            file.write(bytes(mib << 20))
            os.fsync(file.fileno())
    except OSError as error:
        return str(error)

def stores():
    return sorted(name for name in os.listdir(state) if name.startswith("store-"))

async def main():
    store = WorkspaceStore(lambda: True, Settings(state_dir=state, data_dir=disk), room_seconds=0)
    first, beside = [await store.create(name, 300) for name in ("first", "beside")]
    assert write(first, 10) is None
    fill()
    assert write(first, 200) is not None
    subprocess.run(["sync", "-f", first], capture_output=True)  # which the kernel cannot

    # While it is full there is no other volume to be had, and that is said.
    assert await store.create("in-memory", 300) is None
    assert "full" in store.why_in_memory, store.why_in_memory
    assert await store.usage("in-memory") is None and await store.remove("in-memory") == ""

    # And when there is room again there is one.
    os.unlink(disk + "/ballast")
    assert await store.remove("first") == ""
    later = await store.create("later", 300)
    assert not store.why_in_memory
    assert write(later, 50) is None
    assert (await store.usage("later"))[0] >= 50 << 20 and await store.usage("beside")
    assert stores() == ["store-0", "store-1"], "the lost one stays for its last"
    assert await store.remove("beside") == ""
    assert stores() == ["store-1"]

    # One that breaks while nobody looks is noticed by who wants to be there.
    fill()
    assert write(later, 200) is not None
    subprocess.run(["sync", "-f", later], capture_output=True)
    os.unlink(disk + "/ballast")
    last = await store.create("last", 300)
    assert write(last, 50) is None
    assert await store.remove("later") == "" and await store.remove("last") == ""
    assert len(stores()) == 1 and os.listdir(os.path.join(state, *stores())) == []
    await store.close()
    assert stores() == []
    print("done")

state = sys.argv[1] + "/state"
asyncio.run(main())
"""


@needs_volumes
@pytest.mark.parametrize("program", [_PROGRAM, _WORKSPACES], ids=["native", "workspaces"])
def test_a_moment_of_a_full_disk_costs_no_later_sandbox(program: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", _DISK + program, str(tmp_path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr[-4000:]


def test_volumes_share_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Space that was promised to one volume is not promised again, and is free when its holder
    ends."""
    register, free = str(tmp_path / "register"), 1 << 40
    figures = list(os.statvfs(tmp_path))
    figures[1:5] = [4096, free // 4096, free // 4096, free // 4096]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(figures))
    spaces = [Space(str(tmp_path), register) for _ in range(3)]
    sizes = [space.size_bytes for space in spaces]
    assert sum(sizes) < 0.85 * free and sizes == sorted(sizes, reverse=True), sizes
    assert min(sizes) > 16 << 30
    spaces[0].close()
    again = Space(str(tmp_path), register)
    assert again.size_bytes > sizes[0] / 2
    for space in (*spaces[1:], again):
        space.close()
    assert os.listdir(register) == []
