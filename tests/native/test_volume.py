"""The btrfs volume of the native backend, on a real kernel.

Each test runs in a forked child with a mount namespace of its own, so the host sees no mount. The
image lies on a tmpfs where a test asks how much of the host's space is taken: nobody else uses it.
"""

from __future__ import annotations

import errno
import glob
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from paracle_sandbox.jail import kernel
from paracle_sandbox.jail.limits import btrfs
from paracle_sandbox.jail.limits.volume import Volume, VolumeUnavailable

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control"),
    reason="volumes need root and loop devices: run as root, modprobe loop",
)

MIB = 1024 * 1024
GIB = 1024 * MIB
CHUNK = b"\xa5" * MIB


def apart(test: Callable[[], None]) -> None:
    """Run `test` in a child with private mounts. A failure shows its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
            test()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, message or f"the child ended with status {status}"


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def make(directory: Path, size_bytes: int = 8 * GIB, name: str = "mount") -> Volume:
    mountpoint = directory / name
    mountpoint.mkdir(parents=True, exist_ok=True)
    return Volume.create(str(directory), size_bytes, str(mountpoint))


def workspace(volume: Volume, name: str, mib: int) -> str:
    volume.create_subvolume(name)
    volume.limit(name, mib * MIB)
    return volume.path(name)


def fill(path: str, mib: int = 10_000) -> tuple[int, int]:
    """Write up to so many MiB. Returns the bytes written, and the error that stopped it or 0."""
    written = 0
    with open(path, "wb", buffering=0) as file:
        try:
            while written < mib * MIB:
                written += file.write(CHUNK)
        except OSError as error:
            return written, error.errno or -1
    return written, 0


def near(value: int, wanted: int) -> bool:
    return abs(value - wanted) <= wanted * 0.02


def mount_tmpfs(path: Path, size: str) -> None:
    path.mkdir(exist_ok=True)
    kernel.mount("tmpfs", str(path), "tmpfs", 0, f"size={size}")


def taken(path: Path) -> int:
    figures = os.statvfs(path)
    return (figures.f_blocks - figures.f_bfree) * figures.f_frsize


def loops_over(directory: Path) -> list[str]:
    found = []
    for backing in glob.glob("/sys/block/loop*/loop/backing_file"):
        try:
            found.append(Path(backing).read_text())
        except OSError:
            continue  # cleared since the listing
    return [text for text in found if text.startswith(str(directory))]


def fs_id(volume: Volume) -> str:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == volume.mountpoint:
            loop = os.path.basename(fields[-2])
            return Path(glob.glob(f"/sys/fs/btrfs/*/devices/{loop}")[0]).parts[-3]
    raise AssertionError(f"{volume.mountpoint} is not mounted")


def test_limit_is_enforced_and_usage_is_fresh(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        path = workspace(volume, "one", 64)
        assert fill(f"{path}/half", 32) == (32 * MIB, 0)
        assert near(volume.usage("one")[0], 32 * MIB)
        written, error = fill(f"{path}/rest")
        assert error == errno.EDQUOT
        assert near(written, 32 * MIB)
        used, limit = volume.usage("one")
        assert limit == 64 * MIB
        assert near(used, limit)
        assert used <= limit

    apart(test)


def test_limit_can_be_changed_and_is_per_subvolume(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        path = workspace(volume, "one", 16)
        assert fill(f"{path}/a")[1] == errno.EDQUOT
        other = workspace(volume, "two", 32)
        assert fill(f"{other}/a", 20) == (20 * MIB, 0)
        volume.limit("one", 48 * MIB)
        written, error = fill(f"{path}/b")
        assert error == errno.EDQUOT
        assert near(written, 32 * MIB)
        os.unlink(f"{path}/a")
        written, error = fill(f"{path}/c")
        assert error == errno.EDQUOT
        assert near(written, 16 * MIB), "removed space can be used again at once"

    apart(test)


@pytest.mark.parametrize(("size", "least"), [(0, 12_000), (1000, 3_500), (5000, 700)])
def test_small_and_empty_files_count(tmp_path: Path, size: int, least: int) -> None:
    def test() -> None:
        volume = make(tmp_path)
        path = workspace(volume, "one", 8)
        count = 0
        with pytest.raises(OSError) as raised:
            while count < 100_000:
                with open(f"{path}/{count}", "wb", buffering=0) as file:
                    file.write(b"x" * size)
                count += 1
        assert raised.value.errno == errno.EDQUOT
        assert count >= least
        assert near(*volume.usage("one"))

    apart(test)


def test_preallocated_space_counts_and_holes_do_not(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        path = workspace(volume, "one", 64)
        with open(f"{path}/reserved", "wb") as file:
            with pytest.raises(OSError) as raised:
                os.posix_fallocate(file.fileno(), 0, 80 * MIB)
            assert raised.value.errno == errno.EDQUOT
            os.posix_fallocate(file.fileno(), 0, 40 * MIB)
        assert near(volume.usage("one")[0], 40 * MIB)
        with open(f"{path}/sparse", "wb") as file:
            file.truncate(1024 * GIB)
        assert near(volume.usage("one")[0], 40 * MIB)

    apart(test)


def test_workspace_larger_than_the_memory_limit(tmp_path: Path) -> None:
    """900 MB fit a workspace of 1024 MB although the writer may have 512 MB of memory."""
    version_1 = Path("/sys/fs/cgroup/memory")
    parent = version_1 if version_1.exists() else Path("/sys/fs/cgroup")
    limit_file = "memory.limit_in_bytes" if version_1.exists() else "memory.max"
    group = parent / f"paracle-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit_file).write_text(str(512 * MIB))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")

    def test() -> None:
        volume = make(tmp_path)
        path = workspace(volume, "one", 1024)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        assert fill(f"{path}/a", 900) == (900 * MIB, 0)
        written, error = fill(f"{path}/b")
        assert error == errno.EDQUOT
        assert near(written, 124 * MIB)

    def removed() -> bool:
        try:
            group.rmdir()
        except OSError:
            return False
        return True

    try:
        apart(test)
    finally:
        eventually(removed)


def test_killing_the_holder_frees_everything(tmp_path: Path) -> None:
    def test() -> None:
        mount_tmpfs(tmp_path, "200m")
        before = taken(tmp_path)
        reader, writer = os.pipe()
        holder = os.fork()
        if holder == 0:
            kernel.unshare(kernel.CLONE_NEWNS)
            path = workspace(make(tmp_path), "one", 128)
            with open(f"{path}/a", "wb") as file:
                file.write(CHUNK * 50)
                file.flush()
                os.fsync(file.fileno())
                os.write(writer, b"ready")
                signal.pause()
        os.close(writer)
        assert os.read(reader, 5) == b"ready"
        assert len(loops_over(tmp_path)) == 1
        assert taken(tmp_path) >= 50 * MIB
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        eventually(lambda: not loops_over(tmp_path))
        eventually(lambda: taken(tmp_path) <= before)

    apart(test)


def test_nothing_has_a_name_on_the_host(tmp_path: Path) -> None:
    def test() -> None:
        make(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["mount"]

    apart(test)
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    eventually(lambda: not loops_over(tmp_path))


def test_several_processes_make_volumes_at_once(tmp_path: Path) -> None:
    """Each volume has its own id, and two processes that race for a loop device both get one."""

    def one(number: int) -> None:
        kernel.unshare(kernel.CLONE_NEWNS)
        for turn in range(3):
            volume = make(tmp_path, name=f"{number}-{turn}")
            workspace(volume, "one", 16)
            Path(volume.path("one"), "mine").write_text(str(number))
            assert os.listdir(volume.path("one")) == ["mine"]

    def test() -> None:
        children = []
        for number in range(6):
            child = os.fork()
            if child == 0:
                try:
                    one(number)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6

    apart(test)


def test_deleted_space_returns_to_the_host(tmp_path: Path) -> None:
    def test() -> None:
        mount_tmpfs(tmp_path, "200m")
        volume = make(tmp_path)
        path = workspace(volume, "one", 128)
        workspace(volume, "other", 16)
        assert fill(f"{path}/a", 60) == (60 * MIB, 0)
        os.sync()
        assert taken(tmp_path) >= 60 * MIB
        volume.delete_subvolume("one")
        assert not os.path.exists(path)

        def returned() -> bool:
            volume.trim()
            return taken(tmp_path) < 10 * MIB

        eventually(returned)

    apart(test)


def test_delete_whatever_is_inside(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        path = workspace(volume, "one", 64)
        os.makedirs(f"{path}/d/" + "e/" * 100)
        os.mkfifo(f"{path}/fifo")
        os.symlink("/", f"{path}/link")
        Path(path, "theirs").write_text("x")
        os.chown(f"{path}/theirs", 4321, 4321)
        os.chmod(f"{path}/d", 0)
        inside = path
        for _ in range(40):
            fd = os.open(inside, os.O_RDONLY)
            for name in ("deeper", "beside"):
                btrfs.create_subvolume(fd, name)
            os.close(fd)
            inside = f"{inside}/deeper"
        with open(f"{path}/held", "wb"):
            os.chdir(path)
            volume.delete_subvolume("one")
        assert os.listdir(volume.mountpoint) == []
        with pytest.raises(FileNotFoundError):
            volume.delete_subvolume("one")
        workspace(volume, "one", 64)
        assert os.listdir(volume.path("one")) == []

    apart(test)


def test_a_thousand_subvolumes_leave_no_quota_behind(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        seconds = []
        for number in range(1000):
            start = time.perf_counter()
            workspace(volume, f"s{number}", 16)
            seconds.append(time.perf_counter() - start)
        assert sorted(seconds[-100:])[50] < 4 * sorted(seconds[:100])[50] + 0.001
        for number in range(1000):
            volume.delete_subvolume(f"s{number}")

        def forgotten() -> bool:
            volume.create_subvolume("probe")
            volume.delete_subvolume("probe")
            groups = glob.glob(f"/sys/fs/btrfs/{fs_id(volume)}/qgroups/0_*")
            return len(groups) < 200

        eventually(forgotten, seconds=40)

    apart(test)


@pytest.mark.parametrize("what", ["workspace", "file"])
def test_what_was_removed_is_soon_given_back_to_the_host(tmp_path: Path, what: str) -> None:
    """Space must not come back ten seconds after the commit: a sandbox would have twice its limit
    meanwhile."""

    def test() -> None:
        mount_tmpfs(tmp_path, "1g")
        volume = make(tmp_path, GIB)
        path = workspace(volume, "one", 200)
        assert fill(f"{path}/a", 150)[1] == 0
        volume.commit()
        assert taken(tmp_path) > 150 * MIB
        if what == "workspace":
            volume.delete_subvolume("one")
        else:
            os.unlink(f"{path}/a")
            volume.commit()  # as the kernel does every five seconds
        eventually(lambda: taken(tmp_path) < 50 * MIB, seconds=8)

    apart(test)


def test_works_after_the_root_changed(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        os.chroot(elsewhere)
        os.chdir("/")
        volume.create_subvolume("one")
        volume.limit("one", 32 * MIB)
        fd = volume.open("one")
        file = os.open("a", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        os.write(file, CHUNK)
        used, limit = volume.usage("one")
        assert limit == 32 * MIB
        assert used >= MIB
        volume.delete_subvolume("one")
        assert not volume.broken

    apart(test)


def test_a_full_host_disk_is_an_error_that_shows(tmp_path: Path) -> None:
    def test() -> None:
        mount_tmpfs(tmp_path, "48m")
        volume = make(tmp_path)
        path = workspace(volume, "one", 1024)
        with open(f"{path}/a", "wb", buffering=0) as file, pytest.raises(OSError) as raised:
            for _ in range(200):
                file.write(CHUNK)
                os.fsync(file.fileno())
        assert raised.value.errno in (errno.EIO, errno.ENOSPC, errno.EROFS)
        if volume.broken:
            with pytest.raises(OSError, match="Read-only"):
                volume.create_subvolume("two")

    apart(test)


def test_names_cannot_leave_the_volume(tmp_path: Path) -> None:
    def test() -> None:
        volume = make(tmp_path)
        for name in ("", ".", "..", "a/b", "/", "x" * 256):
            with pytest.raises(ValueError, match="not a subvolume name"):
                volume.create_subvolume(name)

    apart(test)


def test_without_root_it_says_so(tmp_path: Path) -> None:
    def test() -> None:
        os.setuid(65534)
        with pytest.raises(VolumeUnavailable, match="root") as raised:
            Volume.create(str(tmp_path), GIB, str(tmp_path))
        assert raised.value.remedy

    apart(test)


def test_the_seed_is_small() -> None:
    assert Path(btrfs.__file__).with_name("seed.btrfs").stat().st_size < 30_000
