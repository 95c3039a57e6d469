"""A sandbox's first process is born in its cgroup and in its pid namespace."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paracle_sandbox.guest.clone import main_thread
from paracle_sandbox.jail import clone, kernel
from paracle_sandbox.jail.clone import can_clone_into, clone_arguments, fork_into

CLONE_ARGS_SIZE_VER2 = 88


class Groups:
    """The part of `Cgroups` that is asked, on directories of a test's own."""

    version = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, slot: str) -> None:
        (self.folder / slot).mkdir()

    def open(self, slot: str) -> os.PathLike[str]:
        return Opened(self.folder / slot)  # type: ignore[return-value]

    def remove(self, slot: str, _: float) -> bool:
        (self.folder / slot).rmdir()
        return True


class Opened:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> int:
        self.fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A group of version 2, below whatever mount of it may be written to."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(mount, os.W_OK):
            found = Path(mount, f"paracle-clone-{os.getpid()}")
            found.mkdir()
            yield found
            found.rmdir()
            return
    pytest.skip("no cgroup file system of version 2 may be written to here")


def in_a_child(action: Callable[[], bytes], *call: int) -> bytes:
    """What it returns in a process that was forked so, which then ends."""
    reading, writing = os.pipe()
    pid = fork_into(*call)
    if pid == 0:
        try:
            os.write(writing, action())
        finally:
            os._exit(7)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    return said


needs_library = pytest.mark.skipif(main_thread() is None, reason="needs a C library that is known")


def test_the_structure_is_the_kernels() -> None:
    arguments = clone_arguments(0x2_0000_0001, 0x1234, 9)
    assert len(arguments) == CLONE_ARGS_SIZE_VER2
    fields = struct.unpack("=11Q", arguments)
    assert fields == (0x2_0000_0001, 0, 0x1234, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 9)


@needs_library
def test_a_fork_without_a_group_is_as_any_other() -> None:
    """The C library knows its own number: its locks, and its own forks, depend on that."""

    def look() -> bytes:
        thread = main_thread()
        second = os.fork()
        if second == 0:
            os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
        number = ctypes.c_int.from_address(thread.tid).value if thread else 0
        return b"%d %d %d" % (number == os.getpid(), os.getppid(), status)

    assert in_a_child(look, 0) == b"1 %d 3" % os.getpid()


@needs_library
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a pid namespace")
def test_a_child_is_the_first_of_its_namespace_and_in_its_group(folder: Path) -> None:
    def look() -> bytes:
        return b"%d %s" % (os.getpid(), Path("/proc/self/cgroup").read_bytes())

    (folder / "one").mkdir()
    with Opened(folder / "one") as group:
        said = in_a_child(look, kernel.CLONE_NEWPID, group)
    (folder / "one").rmdir()
    number, _, groups = said.partition(b" ")
    assert number == b"1"
    assert f"{folder.name}/one".encode() in groups
    assert folder.name not in Path("/proc/self/cgroup").read_text()


@needs_library
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a pid namespace")
def test_what_the_kernel_can_do_is_found_out_once_and_leaves_nothing(folder: Path) -> None:
    assert can_clone_into(Groups(folder))  # type: ignore[arg-type]
    assert not [entry for entry in folder.iterdir() if entry.is_dir()]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.E2BIG, errno.EINVAL, errno.EPERM])
def test_where_the_kernel_refuses_it_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(clone, "fork_by", refuse)
    assert not can_clone_into(Groups(tmp_path))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_is_no_group_is_refused(tmp_path: Path) -> None:
    """The kernel, too, never forks somewhere else instead."""
    if main_thread() is None:
        pytest.skip("needs a C library that is known")
    assert not can_clone_into(Groups(tmp_path))  # type: ignore[arg-type]
