"""A sandbox's first process is born in its cgroup and in its pid namespace."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paracle_sandbox
from paracle_sandbox.guest.clone import main_thread
from paracle_sandbox.jail import clone
from paracle_sandbox.jail.clone import can_clone_into, clone_arguments

CLONE_ARGS_SIZE_VER2 = 88
# In a process of its own: that of the tests may have threads, and must not be forked.
_PREPARE = """
import ctypes, os, sys
from pathlib import Path
from paracle_sandbox.guest.clone import main_thread
from paracle_sandbox.jail import kernel
from paracle_sandbox.jail.clone import can_clone_into, fork_into
from paracle_sandbox.jail.limits.cgroups import Cgroups

def in_a_child(action, *call):
    reading, writing = os.pipe()
    pid = fork_into(*call)
    if pid == 0:
        try:
            os.write(writing, action())
        finally:
            os._exit(7)
    os.close(writing)
    said = open(reading, "rb").read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    return said.decode()
"""
_AS_ANY_OTHER = """
def look():
    second = os.fork()
    if second == 0:
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    number = ctypes.c_int.from_address(main_thread().tid).value
    return b"%d %d %d" % (number == os.getpid(), os.getppid(), status)

assert in_a_child(look, 0) == "1 %d 3" % os.getpid()
"""
_IN_ITS_GROUP = """
def look():
    return b"%d %s" % (os.getpid(), Path("/proc/self/cgroup").read_bytes())

group = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
number, _, groups = in_a_child(look, kernel.CLONE_NEWPID, group).partition(" ")
assert number == "1"
name = "/".join(sys.argv[1].split("/")[-2:])
assert name in groups, groups
assert name not in Path("/proc/self/cgroup").read_text()
"""
_FOUND_OUT = """
groups = Cgroups.adopt(2, [os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)])
groups.paths = {"unified": next(iter(groups._fds))}
assert can_clone_into(groups)
"""

needs_library = pytest.mark.skipif(main_thread() is None, reason="needs a C library that is known")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a pid namespace")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A group of version 2, below whatever mount of it may be written to."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(mount, os.W_OK):
            found = Path(mount, f"paracle-clone-{os.getpid()}")
            (found / "one").mkdir(parents=True)
            yield found / "one"
            (found / "one").rmdir()
            found.rmdir()
            return
    pytest.skip("no cgroup file system of version 2 may be written to here")


def run_apart(program: str, *arguments: str) -> None:
    source = str(Path(paracle_sandbox.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE + program, *arguments],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_structure_is_the_kernels() -> None:
    arguments = clone_arguments(0x2_0000_0001, 0x1234, 9)
    assert len(arguments) == CLONE_ARGS_SIZE_VER2
    fields = struct.unpack("=11Q", arguments)
    assert fields == (0x2_0000_0001, 0, 0x1234, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 9)


@needs_library
def test_a_fork_without_a_group_is_as_any_other() -> None:
    """The C library knows its own number: its locks, and its own forks, depend on that."""
    run_apart(_AS_ANY_OTHER)


@needs_library
@needs_root
def test_a_child_is_the_first_of_its_namespace_and_in_its_group(folder: Path) -> None:
    run_apart(_IN_ITS_GROUP, str(folder))


@needs_library
@needs_root
def test_what_the_kernel_can_do_is_found_out_once_and_leaves_nothing(folder: Path) -> None:
    run_apart(_FOUND_OUT, str(folder))
    assert not [entry for entry in folder.iterdir() if entry.is_dir()]


class Groups:
    """The part of `Cgroups` that is asked, on directories that are no groups."""

    version = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, slot: str) -> None:
        (self.folder / slot).mkdir()

    def open(self, slot: str) -> Groups:
        self.folder_of_slot = self.folder / slot
        return self

    def __enter__(self) -> int:
        self.fd = os.open(self.folder_of_slot, os.O_RDONLY | os.O_DIRECTORY)
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def remove(self, slot: str, _: float) -> bool:
        (self.folder / slot).rmdir()
        return True


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.E2BIG, errno.EINVAL, errno.EPERM])
def test_where_the_kernel_refuses_it_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(clone, "fork_by", refuse)
    assert not can_clone_into(Groups(tmp_path))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@needs_library
def test_what_is_no_group_is_refused(tmp_path: Path) -> None:
    """The kernel never forks somewhere else instead."""
    assert not can_clone_into(Groups(tmp_path))  # type: ignore[arg-type]
