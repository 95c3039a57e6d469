"""Tests of the guest's file operations, which are driven as its loop drives them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import resource
import signal
import socket
import stat
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paracle_sandbox.channel.frames import WINDOW, encode_json
from paracle_sandbox.guest.files.archive import END, ENTRY, FILE, FOLDER, LINK
from paracle_sandbox.guest.files.ops import OPS

RENAME_EXCHANGE = 2
AT_FDCWD = -100


class FakeWire:
    """A stream whose host gives credit back only on demand of the test."""

    def __init__(self, credit: int = WINDOW) -> None:
        self.credit = credit
        self.window = credit
        self.output = bytearray()
        self.entries: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.taken = 0

    def data(self, data: bytes) -> None:
        assert len(data) <= self.credit
        self.credit -= len(data)
        self.output += data

    def event(self, value: dict[str, Any]) -> None:
        size = len(encode_json(7, 1, value))
        assert size <= self.credit
        self.credit -= size
        self.entries += value["entries"]

    def result(self, value: dict[str, Any]) -> None:
        self.answers.append({"ok": True, **value})

    def error(self, code: str, message: str, errno: int | None = None) -> None:
        self.answers.append({"ok": False, "code": code, "message": message, "errno": errno})

    def consumed(self, amount: int) -> None:
        self.taken += amount


class Guest:
    """Run operations to their end in one working directory."""

    def __init__(self, working_dir: Path, tmp_dir: Path) -> None:
        self.working_dir = working_dir
        self.setup = {"working_dir": str(working_dir), "tmp_dir": str(tmp_dir)}

    def begin(self, op: str, wire: FakeWire, **request: Any) -> Any:
        job = OPS[op]({"op": op, **request}, wire, self.setup)
        job.start()
        return job

    def run(self, op: str, content: bytes | None = None, **request: Any) -> dict[str, Any]:
        wire = FakeWire()
        job = self.begin(op, wire, **request)
        if content is not None:
            for start in range(0, len(content), 1 << 20):
                job.on_data(content[start : start + (1 << 20)])
            job.on_end()
        while not wire.answers:
            if not job.wants_turn:
                assert wire.credit < wire.window, "the job waits for nothing"
                wire.credit = wire.window
                job.on_credit()
            job.turn()
        assert len(wire.answers) == 1
        assert not job.wants_turn
        return {**wire.answers[0], "output": bytes(wire.output), "listed": wire.entries}

    def ok(self, op: str, content: bytes | None = None, **request: Any) -> dict[str, Any]:
        answer = self.run(op, content, **request)
        assert answer["ok"], answer
        return answer

    def refused(self, code: str, op: str, content: bytes | None = None, **request: Any) -> str:
        answer = self.run(op, content, **request)
        assert not answer["ok"], answer
        assert answer["code"] == code, answer
        return str(answer["message"])


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    for name in ("workspace", "tmp", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "secret").write_text("canary")
    before = len(os.listdir("/proc/self/fd"))
    yield Guest(tmp_path / "workspace", tmp_path / "tmp")
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor leaked"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return tmp_path / "outside"


def tree_hash(top: Path) -> str:
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names + folders):
            path = Path(folder) / name
            status = path.lstat()
            digest.update(repr((str(path), status.st_mode, status.st_ino)).encode())
            if path.is_file() and not path.is_symlink():
                digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Start another process that swaps two names all the time, as an attacker would."""
    renameat2 = ctypes.CDLL(None).renameat2
    names = os.fsencode(one), os.fsencode(other)
    parent, swapper = os.getpid(), os.fork()
    if swapper == 0:
        while os.getppid() == parent:
            renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)


def entry(kind: int, name: bytes, content: bytes = b"", mode: int = 0o644) -> bytes:
    return ENTRY.pack(kind, mode, len(name), len(content)) + name + content


THE_END = ENTRY.pack(END, 0, 0, 0)


# Reading and writing


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 1, 9 << 20])
def test_bytes_come_back_exactly(guest: Guest, size: int) -> None:
    content = os.urandom(size)
    assert guest.ok("write", content, path="a/b/file.bin")["size"] == size
    answer = guest.ok("read", path=str(guest.working_dir / "a" / "b" / "file.bin"))
    assert answer["output"] == content
    assert answer["size"] == size


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [(0, 3, b"012"), (8, None, b"89"), (8, 100, b"89"), (100, None, b""), (3, 0, b"")],
)
def test_read_takes_a_part(guest: Guest, offset: int, length: int | None, expected: bytes) -> None:
    guest.ok("write", b"0123456789", path="digits")
    assert guest.ok("read", path="digits", offset=offset, length=length)["output"] == expected


@pytest.mark.parametrize("bad", [-1, 1.5, "1", 1 << 70])
def test_numbers_are_checked(guest: Guest, bad: object) -> None:
    guest.ok("write", b"x", path="x")
    guest.refused("invalid", "read", path="x", offset=bad)


def test_reading_stalls_without_credit_and_goes_on_with_it(guest: Guest) -> None:
    guest.ok("write", bytes(1 << 20), path="zeros")
    wire = FakeWire(credit=300 << 10)
    job = guest.begin("read", wire, path="zeros")
    while job.wants_turn:
        job.turn()
    assert len(wire.output) == 300 << 10
    wire.credit = 1 << 20
    job.on_credit()
    while job.wants_turn:
        job.turn()
    assert len(wire.output) == 1 << 20
    assert wire.answers[0]["ok"]


def test_a_turn_is_a_bounded_slice(guest: Guest) -> None:
    guest.ok("write", bytes(2 << 20), path="zeros")
    wire = FakeWire()
    job = guest.begin("read", wire, path="zeros")
    assert len(wire.output) <= 256 << 10
    job.cancel()


def test_data_is_credited_as_it_is_written(guest: Guest) -> None:
    wire = FakeWire()
    job = guest.begin("write", wire, path="x")
    job.on_data(b"abc")
    assert wire.taken == 3
    job.on_credit()
    job.turn()
    job.on_end()
    assert wire.answers == [{"ok": True, "size": 3}]


def test_write_replaces_whole_or_not_at_all(guest: Guest) -> None:
    guest.ok("write", b"old", path="file")
    wire = FakeWire()
    job = guest.begin("write", wire, path="file")
    job.on_data(b"half of the new")
    assert (guest.working_dir / "file").read_bytes() == b"old"
    job.cancel()
    assert (guest.working_dir / "file").read_bytes() == b"old"
    assert os.listdir(guest.working_dir) == ["file"]


def test_modes(guest: Guest) -> None:
    path = guest.working_dir / "script"
    guest.ok("write", b"1", path="script", mode=0o6755)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    guest.ok("write", b"2", path="script")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755, "replacing keeps the mode"
    guest.ok("write", b"3", path="script", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_append_adds_and_a_cancelled_one_is_taken_back(guest: Guest) -> None:
    guest.ok("write", b"one", path="log", append=True)
    guest.ok("write", b"two", path="log", append=True)
    wire = FakeWire()
    job = guest.begin("write", wire, path="log", append=True)
    job.on_data(b"three")
    job.cancel()
    assert (guest.working_dir / "log").read_bytes() == b"onetwo"


def test_write_without_parents_needs_them(guest: Guest) -> None:
    assert "not found" in guest.refused("not_found", "write", b"", path="no/x", parents=False)


def test_write_to_a_directory_is_refused(guest: Guest) -> None:
    guest.ok("mkdir", path="d")
    guest.refused("is_directory", "write", b"x", path="d")
    guest.refused("is_directory", "write", b"x", path="new/")
    guest.refused("is_directory", "write", b"x", path=".")
    guest.refused("is_directory", "read", path="d")


def test_full_disk_is_named_and_leaves_no_temporary_file(guest: Guest) -> None:
    guest.ok("write", b"old", path="file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # EFBIG stands for ENOSPC: both come from write(2) half way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, limits[1]))
    try:
        guest.refused("too_large", "write", bytes(1 << 20), path="file")
        guest.refused("too_large", "write", bytes(1 << 20), path="file", append=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (guest.working_dir / "file").read_bytes() == b"old"
    assert os.listdir(guest.working_dir) == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_no_space_has_its_own_code() -> None:
    from paracle_sandbox.guest.files.paths import to_file_error

    with pytest.raises(OSError) as caught:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")
    assert to_file_error(caught.value, "/workspace/x").code == "no_space"


def test_what_is_no_regular_file_is_refused_without_waiting(guest: Guest) -> None:
    os.mkfifo(guest.working_dir / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(guest.working_dir)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        guest.refused("invalid", "read", path="fifo")
        guest.refused("invalid", "read", path="socket")
        guest.refused("invalid", "write", b"x", path="fifo", append=True)
        assert guest.ok("stat", path="fifo")["kind"] == "other"


def test_places_are_what_a_request_names(guest: Guest, outside: Path) -> None:
    """A request may name more roots, as it does for volumes.

    Below each of them paths work as in the working directory, with links between them.
    """
    (outside / "folder").mkdir()
    (outside / "folder" / "file").write_text("given")
    (guest.working_dir / "link").symlink_to(outside / "folder")
    (guest.working_dir / "up").symlink_to(f"../{outside.name}/folder/file")
    (outside / "folder" / "back").symlink_to(guest.working_dir)
    (outside / "folder" / "out").symlink_to("..")
    places = [str(outside / "folder")]
    for path in ("link/file", f"{places[0]}/file", f"{places[0]}/back/link/file", "up"):
        guest.refused("path_escape", "read", path=path)
        assert guest.ok("read", path=path, places=places)["output"] == b"given"
    for path in ("link/out/secret", f"{places[0]}/../secret", str(outside / "secret"), "../x"):
        guest.refused("path_escape", "read", path=path, places=places)
        guest.refused("path_escape", "write", b"x", path=path, places=places)
    alone = [f"{places[0]}/file"]
    assert guest.ok("read", path=alone[0], places=alone)["output"] == b"given"
    guest.refused("path_escape", "read", path=f"{places[0]}/other", places=alone)
    guest.ok("write", b"new", path=alone[0], places=alone)
    assert (outside / "folder" / "file").read_text() == "new"


# Names and paths


NAMES = [
    b"new\nline",
    b"\xff\xfe",
    b"a" * 255,
    b"-rf",
    b" ",
    "\u202etxt.\u200b".encode(),
    b"...",
    b"~",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_exact_bytes(guest: Guest, name: bytes) -> None:
    text = name.decode("utf-8", "surrogateescape")
    guest.ok("write", b"content", path=text)
    assert os.listdir(os.fsencode(guest.working_dir)) == [name]
    assert [item["name"] for item in guest.ok("list", path=".")["listed"]] == [text]
    assert guest.ok("read", path=text)["output"] == b"content"
    assert entry(FILE, name, b"content") in guest.ok("get_tree", path=".")["output"]
    guest.ok("remove", path=text)


@pytest.mark.parametrize(
    "path", ["..", "../x", "a/../../x", "/", "/etc/passwd", "/proc/self/root", "//etc"]
)
@pytest.mark.parametrize("op", ["read", "write", "list", "stat", "mkdir", "remove", "get_tree"])
def test_paths_that_leave_are_refused(guest: Guest, op: str, path: str) -> None:
    guest.refused("path_escape", op, path=path)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", "x" * 70000, None, 5, b"x"])
def test_what_is_no_path_is_refused(guest: Guest, path: object) -> None:
    guest.refused("invalid", "read", path=path)


def test_dots_that_stay_inside_are_fine(guest: Guest) -> None:
    guest.ok("write", b"x", path="./a/.//../b")
    assert guest.ok("read", path="b/.")["output"] == b"x"
    assert guest.ok("read", path=f"/{guest.working_dir}//a/../b")["output"] == b"x"


def test_tmp_is_the_other_root(guest: Guest, tmp_path: Path) -> None:
    guest.ok("write", b"x", path=str(tmp_path / "tmp" / "d" / "x"))
    assert guest.ok("stat", path=str(tmp_path / "tmp" / "d"))["kind"] == "directory"
    guest.refused("path_escape", "read", path=str(tmp_path / "tmp" / ".." / "outside" / "secret"))


def test_missing_is_said_in_words(guest: Guest) -> None:
    expected = f"File not found: {guest.working_dir}/x"
    for op in ("read", "stat", "list", "remove", "get_tree"):
        assert guest.refused("not_found", op, path="x") == expected
    guest.ok("write", b"", path="file")
    guest.refused("not_directory", "read", path="file/x")
    guest.refused("not_directory", "list", path="file")


# Links


def test_links_that_stay_inside_are_followed(guest: Guest, tmp_path: Path) -> None:
    top = guest.working_dir
    guest.ok("write", b"here", path="v1/deep/file")
    guest.ok("write", b"tmp", path=str(tmp_path / "tmp" / "file"))
    (top / "relative").symlink_to("v1")
    (top / "absolute").symlink_to(top / "v1" / "deep")
    (top / "v1" / "up").symlink_to("../v1/./deep/../deep/file")
    (top / "temporary").symlink_to(tmp_path / "tmp")
    assert guest.ok("read", path="relative/deep/file")["output"] == b"here"
    assert guest.ok("read", path="absolute/file")["output"] == b"here"
    assert guest.ok("read", path="absolute/../v1/up")["output"] == b"here"
    assert guest.ok("read", path="temporary/file")["output"] == b"tmp"
    assert guest.ok("stat", path="relative")["kind"] == "directory"
    guest.ok("write", b"more", path="absolute/new/file")
    assert (top / "v1" / "deep" / "new" / "file").read_bytes() == b"more"


@pytest.mark.parametrize(
    "target", ["{outside}", "../outside", "/proc/self/root", "a/../../outside"]
)
def test_links_that_leave_are_refused(guest: Guest, outside: Path, target: str) -> None:
    (guest.working_dir / "a").mkdir()
    (guest.working_dir / "link").symlink_to(target.format(outside=outside))
    before = tree_hash(outside)
    guest.refused("path_escape", "read", path="link/secret")
    guest.refused("path_escape", "write", b"x", path="link/secret")
    guest.refused("path_escape", "write", b"x", path="link/new/secret")
    guest.refused("path_escape", "list", path="link")
    guest.refused("path_escape", "get_tree", path="link")
    guest.refused("path_escape", "put_tree", THE_END, path="link")
    guest.refused("path_escape", "mkdir", path="link/d")
    guest.refused("path_escape", "remove", path="link/secret")
    guest.refused("path_escape", "move", source="link/secret", target="x")
    guest.refused("target_path_escape", "move", source="a", target="link/x")
    assert tree_hash(outside) == before


def test_a_link_at_the_end_is_written_through_as_far_as_it_stays(
    guest: Guest, outside: Path
) -> None:
    link, target = guest.working_dir / "link", guest.working_dir / "dir" / "target"
    before = tree_hash(outside)
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o750)
    link.symlink_to("dir/target")
    guest.ok("write", b"new", path="link")
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    target.unlink()
    guest.ok("write", b"made", path="link")
    assert link.is_symlink() and target.read_text() == "made"
    link.unlink()
    for leaves in (outside / "secret", outside / "new"):
        link.symlink_to(leaves)
        guest.refused("path_escape", "write", b"mine", path="link")
        link.unlink()
    assert tree_hash(outside) == before


def let_others_in(path: Path) -> None:
    for folder in (path, *path.parents):
        if not folder.stat().st_mode & 1:
            folder.chmod(folder.stat().st_mode | 0o011)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody without its rights")
def test_a_file_that_its_user_may_not_write_is_not_replaced(tmp_path: Path) -> None:
    guest = Guest(tmp_path / "place", tmp_path / "tmp")
    locked = guest.working_dir / "locked"

    def as_user() -> None:
        locked.write_text("kept")
        locked.chmod(0o444)
        guest.refused("permission", "write", b"x", path="locked")
        assert locked.read_text() == "kept"
        assert os.listdir(guest.working_dir) == ["locked"]

    for folder in (guest.working_dir, Path(os.fsdecode(guest.setup["tmp_dir"]))):
        folder.mkdir()
        folder.chmod(0o777)
    let_others_in(tmp_path)
    as_nobody(as_user)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody without its rights")
def test_where_nothing_can_be_made_beside_a_file_its_content_is_replaced(tmp_path: Path) -> None:
    """The directory belongs to another user and the file is writable: a program could write to it,
    too."""
    guest = Guest(tmp_path / "place", tmp_path / "tmp")
    for folder, mode in ((guest.working_dir, 0o755), (tmp_path / "tmp", 0o777)):
        folder.mkdir()
        folder.chmod(mode)
    shared = guest.working_dir / "shared"
    shared.write_text("a longer text than the new one")
    shared.chmod(0o666)
    let_others_in(tmp_path)
    before = shared.stat().st_ino

    def as_user() -> None:
        guest.ok("write", b"short", path="shared")
        guest.refused("permission", "write", b"x", path="new")

    as_nobody(as_user)
    assert shared.read_text() == "short"
    assert shared.stat().st_ino == before
    assert os.listdir(tmp_path / "tmp") == []


def test_what_is_too_large_is_refused_before_any_of_it_is_sent(guest: Guest) -> None:
    with open(guest.working_dir / "holes", "wb") as file:
        file.truncate(1 << 40)
    wire = FakeWire()
    guest.begin("read", wire, path="holes", max_bytes=1 << 20)
    assert wire.answers[0]["code"] == "too_large" and not wire.output
    part = guest.ok("read", path="holes", offset=5, length=3, max_bytes=3)
    assert part["output"] == bytes(3)


def test_a_tree_of_hard_links_is_counted_before_any_of_it_is_sent(guest: Guest) -> None:
    """Each name becomes a copy at the other end: one megabyte here would be a hundred there."""
    one = guest.working_dir / "one"
    one.write_bytes(bytes(1 << 20))
    for number in range(100):
        os.link(one, guest.working_dir / f"name{number}")
    for limits in ({"max_bytes": 100 << 20}, {"max_entries": 100}):
        answer = guest.run("get_tree", path=".", **limits)
        assert answer["code"] == "too_large" and not answer["output"]
    guest.ok("get_tree", path=".", max_bytes=101 << 20, max_entries=101)


def test_a_link_at_the_end_is_removed_or_moved_itself(guest: Guest, outside: Path) -> None:
    link = guest.working_dir / "link"
    before = tree_hash(outside)
    link.symlink_to(outside)
    guest.ok("remove", path="link", recursive=True)
    link.symlink_to(outside)
    guest.ok("move", source="link", target="other")
    assert (guest.working_dir / "other").is_symlink()
    assert tree_hash(outside) == before


def test_circles_and_very_long_detours_end(guest: Guest) -> None:
    top = guest.working_dir
    (top / "a").symlink_to("b")
    (top / "b").symlink_to("a")
    guest.refused("invalid", "read", path="a")
    guest.refused("invalid", "read", path="a/x")
    deep = "/".join(["d"] * 200)
    guest.ok("mkdir", path=deep)
    (top / deep / "link").symlink_to("/".join(["x", ".."] * 600))
    guest.ok("mkdir", path=deep + "/x")
    (top / deep / "x" / "link").symlink_to("../link")
    assert not guest.run("read", path=deep + "/link")["ok"]


WORDS = ["..", ".", "", "a", "in", "out", "up", "abs", "file", "~", "$HOME", "*"]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.text(),
        st.lists(
            st.sampled_from(
                ["..", ".", "", "a", "in", "out", "up", "abs", "file", "~", "$HOME", "*"]
            ),
            max_size=8,
        ).map("/".join),
    ),
    st.booleans(),
)
def test_any_path_stays_beneath_the_roots(
    guest: Guest, outside: Path, path: str, absolute: bool
) -> None:
    top = guest.working_dir
    if not (top / "in").is_symlink():
        (top / "a" / "a").mkdir(parents=True)
        (top / "a" / "file").write_bytes(b"inside")
        for name, target in (("in", "a"), ("out", "../outside"), ("up", ".."), ("abs", outside)):
            for place in (top, top / "a"):
                (place / name).symlink_to(target)
    before = tree_hash(outside)
    full = f"{top}/{path}" if absolute else path
    answer = guest.run("read", path=full)
    assert b"canary" not in answer["output"]
    if answer["ok"]:  # the only file there is; `out/../a/file` names it too, whatever `out` is
        assert answer["output"] == b"inside"
    listed = guest.run("list", path=full, recursive=True)["listed"]
    assert all(item["name"] != "secret" for item in listed)
    assert b"canary" not in guest.run("get_tree", path=full)["output"]
    assert tree_hash(outside) == before


# Directories


def test_list_tells_what_is_there(guest: Guest) -> None:
    guest.ok("write", b"12345", path="d/file", mode=0o640)
    guest.ok("mkdir", path="d/sub/empty")
    (guest.working_dir / "d" / "link").symlink_to("nowhere")
    flat = {item["name"]: item for item in guest.ok("list", path="d")["listed"]}
    assert {name: item["kind"] for name, item in flat.items()} == {
        "file": "file",
        "sub": "directory",
        "link": "symlink",
    }
    assert flat["file"]["size"] == 5
    assert flat["file"]["mode"] == 0o640
    assert flat["file"]["path"] == f"{guest.working_dir}/d/file"
    assert flat["file"]["modified"] == (guest.working_dir / "d" / "file").stat().st_mtime
    answer = guest.ok("list", path=".", recursive=True)
    below = sorted(item["path"].removeprefix(f"{guest.working_dir}/") for item in answer["listed"])
    assert below == ["d", "d/file", "d/link", "d/sub", "d/sub/empty"]
    assert answer["count"] == 5


def test_long_listings_come_in_parts_that_fit(guest: Guest) -> None:
    for number in range(1500):
        (guest.working_dir / (f"{number:04}" + "\u00fc" * 120)).touch()
    answer = guest.ok("list", path=".")
    assert answer["count"] == len(answer["listed"]) == 1500


def test_mkdir(guest: Guest) -> None:
    guest.ok("mkdir", path="a/b/c")
    guest.ok("mkdir", path="a/b/c")
    guest.ok("mkdir", path=".")
    guest.refused("exists", "mkdir", path="a/b", parents=False)
    guest.refused("not_found", "mkdir", path="x/y", parents=False)
    guest.ok("write", b"", path="file")
    guest.refused("exists", "mkdir", path="file")
    guest.refused("not_directory", "mkdir", path="file/x")


def test_remove(guest: Guest) -> None:
    guest.ok("write", b"", path="d/e/file")
    guest.refused("not_empty", "remove", path="d")
    guest.ok("remove", path="d/e/file")
    guest.ok("remove", path="d/e")
    guest.ok("write", b"", path="d/e/f/file")
    guest.ok("remove", path="d", recursive=True)
    assert os.listdir(guest.working_dir) == []
    guest.refused("invalid", "remove", path=".", recursive=True)
    guest.refused("not_found", "remove", path="gone", recursive=True)


def test_move(guest: Guest) -> None:
    guest.ok("write", b"1", path="one")
    guest.ok("write", b"2", path="two")
    guest.ok("write", b"3", path="d/three")
    guest.ok("move", source="one", target="two")
    assert guest.ok("read", path="two")["output"] == b"1"
    guest.ok("move", source="d", target="e")
    assert guest.ok("read", path="e/three")["output"] == b"3"
    assert "not found" in guest.refused("not_found", "move", source="one", target="x")
    guest.refused("is_directory", "move", source="two", target="e")
    guest.refused("target_not_found", "move", source="two", target="no/where")
    guest.refused("invalid", "move", source=".", target="x")
    guest.refused("invalid", "move", source="e", target="e/f")


@pytest.fixture
def two_mounts(tmp_path: Path) -> Iterator[Guest]:
    shm = Path("/dev/shm")
    (tmp_path / "workspace").mkdir()
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm as a file system of its own")
    other = shm / f"paracle-test-{os.getpid()}"
    other.mkdir()
    guest = Guest(tmp_path / "workspace", other)
    yield guest
    Guest(other.parent, other).ok("remove", path=other.name, recursive=True)


def test_move_between_file_systems(two_mounts: Guest) -> None:
    guest = two_mounts
    other = guest.setup["tmp_dir"]
    guest.ok("write", os.urandom(1 << 20), path="d/e/file", mode=0o750)
    content = guest.ok("read", path="d/e/file")["output"]
    (guest.working_dir / "d" / "link").symlink_to("e/file")
    (guest.working_dir / "d" / "empty").mkdir()
    guest.ok("move", source="d", target=f"{other}/moved")
    assert os.listdir(guest.working_dir) == []
    moved = Path(other) / "moved"
    assert (moved / "link").read_bytes() == content
    assert stat.S_IMODE((moved / "e" / "file").stat().st_mode) == 0o750
    assert (moved / "empty").is_dir()
    guest.ok("move", source=f"{other}/moved/e/file", target="file")
    guest.ok("move", source=f"{other}/moved/link", target="link")
    assert (guest.working_dir / "file").read_bytes() == content
    assert sorted(os.listdir(moved)) == ["e", "empty"]
    guest.ok("write", b"", path="full/x")
    guest.refused("not_empty", "move", source=f"{other}/moved", target="full")
    assert sorted(os.listdir(guest.working_dir)) == ["file", "full", "link"]


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Guest]:
    """Provide a workspace in memory, where creating and removing 50 000 directories does not wait
    for a disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path) as folder:
        yield Guest(Path(folder), tmp_path)


def test_trees_far_deeper_than_a_path_can_say(in_memory: Guest) -> None:
    guest = in_memory
    depth = 50_000
    position = os.open(guest.working_dir, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=position)
        inner = os.open("d", os.O_RDONLY, dir_fd=position)
        os.close(position)
        position = inner
    os.close(position)
    answer = guest.ok("list", path=".", recursive=True)
    assert answer["count"] >= 500
    assert answer["skipped"] == 1
    assert guest.ok("get_tree", path=".")["skipped"] == 1
    deep = "/".join(["d"] * 10_000)
    assert guest.ok("stat", path=deep)["kind"] == "directory"
    guest.ok("remove", path="d", recursive=True)
    assert os.listdir(guest.working_dir) == []


def test_removal_takes_turns_and_can_be_cancelled(guest: Guest) -> None:
    for number in range(1000):
        (guest.working_dir / f"{number}").touch()
    os.makedirs(guest.working_dir / "d" / "e")
    for number in range(1000):
        (guest.working_dir / "d" / f"{number}").touch()
    wire = FakeWire()
    job = guest.begin("remove", wire, path="d", recursive=True)
    assert len(os.listdir(guest.working_dir / "d")) >= 700
    job.cancel()
    assert not wire.answers
    guest.ok("remove", path="d", recursive=True)


def as_nobody(action: Callable[[], None]) -> None:
    """Run the action in a child without root's privileges. An exception there fails the test."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            action()
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody without its rights")
def test_locked_directories(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    os.chown(top, 65534, 65534)
    for folder in (top, *top.parents):
        if not folder.stat().st_mode & 1:
            folder.chmod(folder.stat().st_mode | 0o011)
    guest = Guest(top, tmp_path / "none")

    def check() -> None:
        for name in ("closed", "readonly"):
            (top / name / "inner").mkdir(parents=True)
            (top / name / "inner" / "file").touch()
        (top / "plain").write_text("x")
        (top / "plain").chmod(0)
        (top / "closed" / "inner").chmod(0)
        (top / "closed").chmod(0)
        (top / "readonly" / "inner").chmod(0o555)
        (top / "readonly").chmod(0o555)
        assert guest.ok("list", path=".", recursive=True)["skipped"] == 1
        assert guest.ok("get_tree", path=".")["skipped"] == 2
        guest.refused("permission", "read", path="plain")
        guest.refused("permission", "write", b"", path="readonly/new")
        guest.ok("remove", path="closed", recursive=True)
        guest.ok("remove", path="readonly", recursive=True)

    as_nobody(check)
    assert os.listdir(top) == ["plain"]


# Trees


def test_a_tree_goes_in_and_comes_out(guest: Guest) -> None:
    big = os.urandom(700_000)
    stream = (
        entry(FOLDER, b"d", mode=0o700)
        + entry(FOLDER, b"d/empty", mode=0o755)
        + entry(FILE, b"d/big", big, mode=0o755)
        + entry(FILE, b"none")
        + entry(LINK, b"link", b"d/big")
        + THE_END
    )
    assert guest.ok("put_tree", stream, path="new/place")["entries"] == 5
    top = guest.working_dir / "new" / "place"
    assert (top / "link").read_bytes() == big
    assert stat.S_IMODE((top / "d" / "big").stat().st_mode) == 0o755
    assert os.listdir(top.parent) == ["place"]
    answer = guest.ok("get_tree", path="new/place")
    assert answer["entries"] == 4
    assert answer["skipped"] == 1
    assert guest.ok("put_tree", answer["output"], path="copy")["entries"] == 4
    assert (guest.working_dir / "copy" / "d" / "big").read_bytes() == big


def test_a_tree_joins_what_is_there(guest: Guest, outside: Path) -> None:
    before = tree_hash(outside)
    guest.ok("write", b"kept", path="d/kept")
    guest.ok("write", b"old", path="d/replaced")
    (guest.working_dir / "link").symlink_to(outside / "secret")
    stream = (
        entry(FOLDER, b"d") + entry(FILE, b"d/replaced", b"new") + entry(FILE, b"link", b"mine")
    )
    guest.ok("put_tree", stream + THE_END, path=".")
    assert guest.ok("read", path="d/kept")["output"] == b"kept"
    assert guest.ok("read", path="d/replaced")["output"] == b"new"
    assert guest.ok("read", path="link")["output"] == b"mine"
    assert sorted(os.listdir(guest.working_dir)) == ["d", "link"]
    assert tree_hash(outside) == before


def test_a_tree_does_not_follow_links_that_are_there(guest: Guest, outside: Path) -> None:
    before = tree_hash(outside)
    (guest.working_dir / "d").symlink_to(outside)
    stream = entry(FOLDER, b"d") + entry(FILE, b"d/secret", b"new") + THE_END
    guest.refused("not_directory", "put_tree", stream, path=".")
    assert tree_hash(outside) == before
    assert os.listdir(guest.working_dir) == ["d"]


def test_a_broken_tree_leaves_nothing(guest: Guest) -> None:
    good = entry(FOLDER, b"d") + entry(FILE, b"d/file", b"x" * 100)
    for stream in (good, good[:-1], good + THE_END + b"x", good + entry(9, b"x") + THE_END):
        guest.refused("invalid", "put_tree", stream, path="place")
        assert os.listdir(guest.working_dir) == []
    wire = FakeWire()
    job = guest.begin("put_tree", wire, path="place")
    job.on_data(good)
    job.cancel()
    assert os.listdir(guest.working_dir) == []
    through = entry(LINK, b"l", b"..") + entry(FILE, b"l/x", b"x") + THE_END
    guest.refused("path_escape", "put_tree", through, path="place")
    guest.refused("path_escape", "put_tree", entry(FILE, b"../x") + THE_END, path="place")


def test_special_files_are_left_out_of_trees(guest: Guest) -> None:
    os.mkfifo(guest.working_dir / "fifo")
    (guest.working_dir / "link").symlink_to("/etc/passwd")
    guest.ok("write", b"x", path="file")
    answer = guest.ok("get_tree", path=".")
    assert answer["output"] == entry(FILE, b"file", b"x") + THE_END
    assert (answer["entries"], answer["skipped"]) == (1, 2)


def test_a_tree_waits_for_credit(guest: Guest) -> None:
    guest.ok("write", bytes(3 << 20), path="zeros")
    wire = FakeWire(credit=600 << 10)
    job = guest.begin("get_tree", wire, path=".")
    for _ in range(50):
        if job.wants_turn:
            job.turn()
    assert not wire.answers
    while not wire.answers:
        wire.credit = 1 << 20
        job.on_credit()
        job.turn()
    assert wire.output[-ENTRY.size :] == THE_END
    assert struct.calcsize(">BHHQ") == ENTRY.size


# Races: a program inside swaps a directory for a link while the host asks for it


@pytest.mark.timeout(60)
def test_swapping_a_directory_for_a_link_never_leads_out(guest: Guest, outside: Path) -> None:
    top = guest.working_dir
    (top / "d" / "sub").mkdir(parents=True)
    (top / "d" / "secret").write_text("decoy")
    (top / "d" / "sub" / "secret").write_text("decoy")
    (top / "swap").symlink_to(outside)
    (outside / "sub").mkdir()
    (outside / "sub" / "secret").write_text("canary")
    before = tree_hash(outside)
    seen, naive = set(), set()
    with exchanging(top / "d", top / "swap"):
        for _ in range(1000):
            naive.add((top / "d" / "secret").read_bytes())
            seen.add(guest.run("read", path="d/secret")["output"])
            seen.add(guest.run("read", path="d/sub/secret")["output"])
            assert b"canary" not in guest.run("get_tree", path=".")["output"]
            guest.run("write", b"decoy", path="d/secret")
            guest.run("write", b"decoy", path="d/new/secret")
            guest.run("put_tree", entry(FOLDER, b"d") + entry(FILE, b"d/put") + THE_END, path=".")
            guest.run("remove", path="d/new", recursive=True)
    assert b"canary" in naive, "the race was not run: an ordinary open must lose it"
    assert seen <= {b"", b"decoy"}
    assert tree_hash(outside) == before


@pytest.mark.timeout(60)
def test_removal_while_directories_are_swapped(guest: Guest, outside: Path) -> None:
    top = guest.working_dir
    for number in range(50):
        (outside / str(number)).mkdir()
        (outside / str(number) / "secret").write_text("canary")
    before = tree_hash(outside)
    (top / "link").symlink_to(outside)
    with exchanging(top / "d" / "victim", top / "link"):
        for _ in range(40):
            for number in range(20):
                os.makedirs(top / "d" / f"a{number}" / "b", exist_ok=True)
            if not os.path.lexists(top / "d" / "victim"):
                (top / "d" / "victim").mkdir()
            guest.run("remove", path="d", recursive=True)
    assert tree_hash(outside) == before
