"""Tests of Landlock on this kernel: what a confined process may still do, and what not."""

import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

import paracle_sandbox
from paracle_sandbox.jail.filters import landlock

SOURCE = str(pathlib.Path(paracle_sandbox.__file__).parent.parent)

pytestmark = pytest.mark.skipif(bool(landlock.unavailable()), reason=str(landlock.unavailable()))

TOOLS = """
import ctypes, errno, os, socket, sys
from paracle_sandbox.jail.filters import landlock

libc = ctypes.CDLL(None)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.prctl(38, 1, 0, 0, 0)

def refused(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EPERM, errno.EXDEV)
    return False

def write(path):
    with open(path, "w") as file:
        file.write("x")
"""


def check(body, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", TOOLS + textwrap.dedent(body), *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.fixture
def places(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (inside / "a", inside / "b", outside):
        place.mkdir(parents=True)
    (outside / "file").write_text("canary")
    yield inside, outside
    assert (outside / "file").read_text() == "canary"
    assert os.listdir(outside) == ["file"]


def test_writes_stay_inside(places):
    check(
        """
        inside, outside = sys.argv[1:]
        landlock.restrict(["/"], [inside])
        assert open(outside + "/file").read() == "canary"
        assert refused(write, outside + "/file")
        assert refused(write, outside + "/new")
        assert refused(os.truncate, outside + "/file", 0) or landlock.abi() < 3
        assert refused(os.unlink, outside + "/file")
        assert refused(os.mkdir, outside + "/d")
        assert refused(os.rename, outside + "/file", inside + "/stolen")
        assert refused(os.link, outside + "/file", inside + "/linked")
        """,
        *places,
    )


def test_all_but_devices_can_be_made_inside_and_moved_between_directories(places):
    check(
        """
        import subprocess
        inside = sys.argv[1]
        landlock.restrict(["/"], [inside])
        write(inside + "/a/file")
        os.rename(inside + "/a/file", inside + "/b/file")
        os.link(inside + "/b/file", inside + "/a/linked")
        os.truncate(inside + "/b/file", 0)
        os.symlink("x", inside + "/a/symlink")
        os.mkfifo(inside + "/a/fifo")
        socket.socket(socket.AF_UNIX).bind(inside + "/a/socket")
        assert refused(os.mknod, inside + "/null", 0o020666, os.makedev(1, 3))
        subprocess.run(["true"], check=True, stdin=0)
        """,
        *places,
    )


def test_what_is_not_listed_cannot_be_read_either(places):
    check(
        """
        inside, outside = sys.argv[1:]
        landlock.restrict(["/usr", sys.prefix], [inside], ["/dev/null"])
        assert refused(open, outside + "/file")
        assert refused(os.listdir, outside)
        assert refused(open, "/dev/zero")
        write("/dev/null")
        """,
        *places,
    )


def test_controlling_a_device_needs_it_to_be_listed():
    check(
        """
        import fcntl
        def ask(path):
            with open(path) as device:
                fcntl.ioctl(device, 0x5401, bytes(64))  # TCGETS: neither is a terminal
        landlock.restrict(["/"], [], ["/dev/null"])
        assert refused(ask, "/dev/zero") or landlock.abi() < 5
        assert not refused(ask, "/dev/null")
        """
    )


@pytest.mark.skipif(landlock.abi() < 6, reason="scopes came with ABI 6")
def test_signals_and_abstract_sockets_do_not_leave():
    with socket.socket(socket.AF_UNIX) as canary:
        name = f"paracle-canary-{os.getpid()}"
        canary.bind(f"\0{name}")
        canary.listen()
        canary.setblocking(False)
        check(
            """
            name = "\\0" + sys.argv[1]
            landlock.restrict(["/"], [])
            assert refused(os.kill, os.getppid(), 0)
            assert refused(socket.socket(socket.AF_UNIX).connect, name)
            own = socket.socket(socket.AF_UNIX)
            own.bind(name + "-own")
            own.listen()
            socket.socket(socket.AF_UNIX).connect(name + "-own")
            child = os.fork()
            if child == 0:
                import signal
                signal.pause()
            os.kill(child, 9)
            assert os.waitpid(child, 0)[1] == 9
            os._exit(0)
            """,
            name,
        )
        with pytest.raises(BlockingIOError):
            canary.accept()


def test_a_missing_place_is_named():
    with pytest.raises(FileNotFoundError, match="no-such-place"):
        landlock.restrict(["/no-such-place"], [])
