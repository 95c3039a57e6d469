"""Tests of disk, inodes and descriptors (catalogue section D)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pressure import MIB, Scene, needs_root

from paracle_sandbox.errors import ResourceLimitError, SandboxError, SandboxFileError

pytestmark = needs_root

DISK_MB = 256

FILL = """
import sys
with open(sys.argv[1], "wb", buffering=0) as file:
    for _ in range(int(sys.argv[2])):
        file.write(b"x" * (1 << 20))
print("written")
"""
MANY_FILES = """
import os, sys
for number in range(int(sys.argv[1])):
    # Long names, because a file costs what is stored of it, and time is short.
    os.close(os.open("%s/%0250d" % (sys.argv[2], number), os.O_CREAT | os.O_WRONLY))
print("made")
"""


def used_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def assert_disk_error(error: ResourceLimitError) -> None:
    assert error.resource_type == "disk"
    assert error.limit == DISK_MB * MIB
    assert error.usage is not None and 0.9 * error.limit <= error.usage <= 1.02 * error.limit


@pytest.mark.parametrize("path", ["/workspace/fill", "/tmp/fill"])
@pytest.mark.case("D01")
@pytest.mark.clock
async def test_one_large_file_ends_at_the_limit(path):
    async with Scene() as scene:
        sandbox, peer = await scene.sandbox(disk_mb=DISK_MB), await scene.sandbox(disk_mb=DISK_MB)
        before = used_bytes(scene.volume(sandbox))
        async with scene.neighbour():
            with pytest.raises(ResourceLimitError) as caught:
                await sandbox.run_code(FILL, [path, "2000"], timeout=120)
        assert_disk_error(caught.value)
        assert "No space left" in caught.value.stderr or "quota" in caught.value.stderr
        # The host's own disk is not measured, because other programs write there meanwhile.
        grown = used_bytes(scene.volume(sandbox)) - before
        assert DISK_MB * MIB // 2 < grown <= DISK_MB * MIB * 1.01
        await peer.write_file("still", "writes")
        assert await peer.read_file("still") == "writes"
        (scene.place.state / "still").write_text("writes")
        (scene.place.state / "still").unlink()
        # The space of deleted files can be used again.
        await sandbox.execute(["rm", path])
        assert (await sandbox.execute("echo well > small && cat small"))["stdout"] == "well\n"


@pytest.mark.case("D01")
async def test_below_the_limit_all_is_well():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=DISK_MB)
        result = await sandbox.run_code(FILL, ["/workspace/fill", "200"], timeout=120)
        assert result["stdout"] == "written\n"


@pytest.mark.case("D01")
async def test_the_host_s_own_writing_into_a_full_workspace_is_refused_as_such():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=DISK_MB)
        with pytest.raises(ResourceLimitError):
            await sandbox.run_code(FILL, ["fill", "2000"], timeout=120)
        with pytest.raises(SandboxError) as caught:
            await sandbox.write_file("more", b"x" * (8 * MIB))
        assert "space" in str(caught.value).lower() or "disk" in str(caught.value).lower()
        assert not await sandbox.exists("more")


@pytest.mark.case("D02")
@pytest.mark.clock
async def test_empty_files_are_bounded_and_quickly_removed():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=DISK_MB, cpu_cores=2)
        inodes = os.statvfs(scene.place.data).f_favail
        async with scene.neighbour():
            with pytest.raises(ResourceLimitError) as caught:
                await sandbox.run_code(MANY_FILES, [str(10**7), "/workspace"], timeout=280)
        assert caught.value.resource_type == "disk"
        assert inodes - os.statvfs(scene.place.data).f_favail < 100_000
        started = time.monotonic()
        await scene.manager.destroy(sandbox.sandbox_id)
        assert time.monotonic() - started < 30


@pytest.mark.case("D02")
async def test_the_same_program_with_few_files_succeeds():
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=DISK_MB)
        result = await sandbox.run_code(MANY_FILES, ["5000", "/tmp"], timeout=60)
        assert result["stdout"] == "made\n"


@pytest.mark.case("D04")
@pytest.mark.clock
async def test_allocating_punching_and_syncing_stay_within_the_limit():
    program = """
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
fd = os.open("file", os.O_RDWR | os.O_CREAT)
refused = libc.fallocate(fd, 0, 0, 1 << 40)
end, rounds = time.monotonic() + 3, 0
while time.monotonic() < end:
    libc.fallocate(fd, 0, 0, 16 << 20)
    os.pwrite(fd, b"x" * 65536, rounds % 200 * 65536)
    os.fsync(fd)
    libc.fallocate(fd, 3, 0, 16 << 20)
    rounds += 1
print(refused, rounds > 3)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox(disk_mb=DISK_MB)
        async with scene.neighbour():
            result = await sandbox.run_code(program, timeout=60)
        assert result["stdout"] == "-1 True\n", result
        assert (await sandbox.get_stats())["disk_mb"] <= DISK_MB * 1.02


@pytest.mark.case("D05")
async def test_nothing_written_anywhere_meets_the_next_sandbox():
    places = (
        "/dev/shm /run /var/tmp /tmp $HOME /var/lock /workspace /home /opt /srv /mnt /var /etc /"
    )
    async with Scene(stock=2) as scene:
        first = await scene.sandbox()
        await first.execute(f"for d in {places}; do echo x > $d/left-behind; done 2>/dev/null")
        written = (await first.execute("find / -name left-behind 2>/dev/null"))["stdout"].split()
        assert {"/tmp/left-behind", "/workspace/left-behind", "/dev/shm/left-behind"} <= set(
            written
        )
        during = await scene.sandbox()
        await scene.manager.destroy(first.sandbox_id)
        after = await scene.sandbox()
        for other in (during, after):
            found = await other.execute("find / -name left-behind 2>/dev/null; ls -A /tmp /dev/shm")
            assert "left-behind" not in found["stdout"]


# Each top is created where the path is short, and the tower is moved below it.
TOWER = """
import os, sys
levels, step = int(sys.argv[1]), 200
for number in range(levels // step):
    os.makedirs("new/" + "/".join("d" * step))
    if number:
        os.rename("tower", "new/" + "/".join("d" * step) + "/d")
    os.rename("new", "tower")
print("built")
"""


@pytest.mark.case("D06")
async def test_deep_directories_can_be_listed_and_removed(tmp_path):
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=2)
        result = await sandbox.run_code(TOWER, ["3000"], timeout=100)
        assert result["stdout"] == "built\n", result["stderr"][-500:]
        # The listing goes as deep as a path can name, and not below that.
        assert 500 < len(await sandbox.list_files("tower", recursive=True)) <= 3000
        await sandbox.copy_from("tower", tmp_path / "copy")
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
        await sandbox.remove("tower", recursive=True)
        assert not await sandbox.exists("tower")


@pytest.mark.case("D06")
async def test_a_tower_of_fifty_thousand_goes_with_its_sandbox():
    async with Scene() as scene:
        sandbox = await scene.sandbox(cpu_cores=2)
        result = await sandbox.run_code(TOWER, ["50000"], timeout=200)
        assert result["stdout"] == "built\n", result["stderr"][-500:]
        started = time.monotonic()
        await scene.manager.destroy(sandbox.sandbox_id)
        assert time.monotonic() - started < 10


@pytest.mark.case("D08")
async def test_descriptors_are_bounded_also_those_in_flight():
    program = """
import array, os, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
sent, pairs = 0, []
try:
    while True:
        pairs.append(socket.socketpair())
        fds = array.array("i", [os.open("/dev/null", 0)] * 200)
        pairs[-1][0].setblocking(False)
        for _ in range(50):
            pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            sent += 200
except OSError as error:
    print(sent, error.errno)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        mine = len(os.listdir("/proc/self/fd"))
        result = await sandbox.run_code(program, timeout=60)
        sent, number = map(int, result["stdout"].split())
        assert sent < 50_000 and number in (24, 109, 11, 105), result
        assert abs(len(os.listdir("/proc/self/fd")) - mine) <= 2


ODD_NAMES = [
    b"two\nlines", b"\xff\xfe not text", b"n" * 255, b"-rf", b"--help", b"...", b" ", b"*",
    "\u202ereversed".encode(), "zero\u200bwidth".encode(), b"$(touch pwned)", b"'\"`\\",
]  # fmt: skip


@pytest.mark.case("D09")
async def test_odd_names_come_back_byte_for_byte(tmp_path):
    program = f"""
for name in {ODD_NAMES!r}:
    with open(name, "wb") as file:
        file.write(name)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        assert (await sandbox.run_code(program))["exit_code"] == 0
        listed = {os.fsencode(entry["name"]) for entry in await sandbox.list_files()}
        assert listed == set(ODD_NAMES)
        for name in ODD_NAMES:
            assert await sandbox.read_bytes(os.fsdecode(name)) == name
        await sandbox.copy_from(".", tmp_path / "copy")
        copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
        assert {os.fsencode(name): text for name, text in copied.items()} == {
            n: n for n in ODD_NAMES
        }
        for name in ("with\0nul", "..", "../x", "/etc/x"):
            with pytest.raises(SandboxError):
                await sandbox.write_file(name, "x")
        for name in ODD_NAMES:
            await sandbox.remove(os.fsdecode(name))
        assert await sandbox.list_files() == []


def written_bytes() -> int:
    """Return how many bytes this process has written."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


ODD_FILE = """
import os, sys
open("odd", "w").close()
for bits in range(63, 40, -1):  # as large as the file system has them
    try:
        os.truncate("odd", 2 ** bits - 1 if sys.argv[1] == "large" else 0)
        break
    except OSError:
        pass
if sys.argv[1] != "large":
    os.utime("odd", (int(sys.argv[1]),) * 2)
status = os.stat("odd")
print(status.st_size, status.st_mtime)
"""


@pytest.mark.parametrize("odd", ["large", str(2**62), str(-(2**62))])
@pytest.mark.case("D09")
async def test_odd_sizes_and_times_are_told_and_break_nothing(odd, tmp_path):
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        size, modified = (await sandbox.run_code(ODD_FILE, [odd]))["stdout"].split()
        for entry in (*await sandbox.list_files(), await sandbox.stat("odd")):
            assert (entry["size"], entry["modified"]) == (int(size), float(modified))
        if int(size):
            for source in ("odd", "."):
                before = written_bytes()
                with pytest.raises(SandboxFileError, match="larger"):
                    await sandbox.copy_from(source, tmp_path / "copy", max_bytes=64 * MIB)
                assert written_bytes() - before < 16 * MIB, "what cannot be taken was copied"
            assert list(tmp_path.iterdir()) == []
        assert (await sandbox.execute("echo well"))["stdout"] == "well\n"


@pytest.mark.case("D10")
async def test_locked_directories_and_flags_do_not_outlive_the_sandbox():
    program = """
import ctypes, fcntl, os, struct
os.makedirs("locked/inner")
open("locked/inner/file", "w").close()
fd = os.open("locked/inner/file", os.O_RDONLY)
try:
    fcntl.ioctl(fd, 0x40086602, struct.pack("l", 0x10))  # FS_IOC_SETFLAGS, immutable
    print("immutable")
except OSError as error:
    print("refused")
os.chmod("locked/inner", 0)
os.chmod("locked", 0)
"""
    async with Scene() as scene:
        sandbox = await scene.sandbox()
        assert (await sandbox.run_code(program))["stdout"] == "refused\n"
        await scene.manager.destroy(sandbox.sandbox_id)
