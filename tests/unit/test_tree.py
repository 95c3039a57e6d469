"""Tests of what the host writes to its own disk for a sandbox, and of the stream that it sends
in."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paracle_sandbox.errors import SandboxFileError, SandboxFileNotFoundError, SandboxPathError
from paracle_sandbox.sandbox.host_copy import FileSink, Unpacker, pack

# This is written out, not imported: the format is a promise between host and guest.
ENTRY = struct.Struct(">BHHQ")
END, FILE, FOLDER, LINK = 0, 1, 2, 3
THE_END = ENTRY.pack(END, 0, 0, 0)
RENAME_EXCHANGE = 2
AT_FDCWD = -100


def entry(kind: int, name: bytes, content: bytes = b"", mode: int = 0o644) -> bytes:
    return ENTRY.pack(kind, mode, len(name), len(content)) + name + content


def tree_hash(top: Path) -> str:
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names + folders):
            path = Path(folder) / name
            status = path.lstat()
            facts = (str(path), status.st_mode, status.st_ino, status.st_nlink, status.st_mtime_ns)
            digest.update(repr(facts).encode("utf-8", "surrogateescape"))
            if path.is_file() and not path.is_symlink():
                digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Provide a tree that no test may touch. If one does, every test that uses it fails."""
    top = tmp_path / "canary"
    (top / "sub").mkdir(parents=True)
    (top / "secret").write_text("host-only")
    (top / "sub" / "file").write_text("host-only")
    before = tree_hash(top)
    descriptors = len(os.listdir("/proc/self/fd"))
    yield top
    assert tree_hash(top) == before
    # (There are fewer if one of an earlier test was collected meanwhile.)
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "a descriptor leaked"


@pytest.fixture
def place(tmp_path: Path, canary: Path) -> Path:
    """Provide an otherwise empty directory to unpack in."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def unpack(
    stream: bytes,
    destination: Path,
    *,
    step: int = 1 << 20,
    max_bytes: int = 1 << 24,
    max_entries: int = 1000,
) -> int:
    unpacker = Unpacker(destination, max_bytes=max_bytes, max_entries=max_entries)
    try:
        for start in range(0, len(stream), step):
            unpacker.feed(stream[start : start + step])
        return unpacker.finish()
    finally:
        unpacker.abort()


def make_tree(top: Path) -> dict[str, bytes]:
    files = {
        "a": b"",
        "d/e/f/deep": b"deep",
        "d/big": os.urandom(600_000),
        os.fsdecode(b"d/\xff\n"): b"name",
    }
    for name, content in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(content)
    (top / "d" / "empty").mkdir()
    (top / "a").chmod(0o4755)
    return files


# The way out and back


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_tree_survives_the_round_trip(tmp_path: Path, place: Path, step: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    files = make_tree(source)
    if step == 1:
        (source / "d" / "big").write_bytes(files.setdefault("d/big", b"")[:1000])
        files["d/big"] = files["d/big"][:1000]
    stream = b"".join(pack(source))
    assert unpack(stream, place / "copy", step=step) == len(files) + 4
    for name, content in files.items():
        assert (place / "copy" / name).read_bytes() == content
    assert (place / "copy" / "d" / "empty").is_dir()
    assert stat.S_IMODE((place / "copy" / "a").stat().st_mode) == 0o755
    assert os.listdir(place) == ["copy"]


def test_pack_sends_links_as_links_and_leaves_special_files_out(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        stream = b"".join(pack(tmp_path))
    assert stream == entry(LINK, b"link", b"/etc/passwd", mode=0o777) + THE_END


def test_pack_of_what_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(SandboxFileNotFoundError, match="not found"):
        list(pack(tmp_path / "missing"))
    (tmp_path / "file").touch()
    with pytest.raises(SandboxFileError):
        list(pack(tmp_path / "file"))


def test_an_empty_tree_makes_an_empty_directory(place: Path) -> None:
    assert unpack(THE_END, place / "new" / "sub") == 0
    assert os.listdir(place / "new" / "sub") == []


def test_content_joins_an_existing_directory(place: Path) -> None:
    (place / "d" / "sub").mkdir(parents=True)
    (place / "d" / "kept").write_text("kept")
    (place / "d" / "replaced").write_text("old")
    (place / "d" / "sub" / "kept").write_text("kept")
    stream = (
        entry(FOLDER, b"d")
        + entry(FILE, b"d/replaced", b"new")
        + entry(FOLDER, b"d/sub")
        + entry(FILE, b"d/sub/new", b"new")
        + entry(FILE, b"top", b"new")
        + THE_END
    )
    assert unpack(stream, place) == 5
    contents = {
        str(path.relative_to(place)): path.read_text()
        for path in place.rglob("*")
        if path.is_file()
    }
    assert contents == {
        "d/kept": "kept",
        "d/replaced": "new",
        "d/sub/kept": "kept",
        "d/sub/new": "new",
        "top": "new",
    }


def test_the_current_directory_is_a_destination(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    unpack(entry(FILE, b"x", b"1") + THE_END, Path("."))
    unpack(entry(FILE, b"x", b"2") + THE_END, Path("y"))
    assert (place / "x").read_bytes() == b"1"
    assert (place / "y" / "x").read_bytes() == b"2"


def test_nothing_appears_before_the_end(place: Path) -> None:
    (place / "file").write_text("old")
    unpacker = Unpacker(place, max_bytes=100, max_entries=10)
    unpacker.feed(entry(FILE, b"file", b"new") + entry(FILE, b"half", b"12345")[:-1])
    assert (place / "file").read_text() == "old"
    assert not (place / "half").exists()
    unpacker.abort()
    unpacker.abort()
    assert os.listdir(place) == ["file"]


# Hostile streams


def header(
    kind: int, name: bytes, size: int, length: int | None = None, mode: int = 0o644
) -> bytes:
    return ENTRY.pack(kind, mode, len(name) if length is None else length, size) + name


PATHS = [
    b"..",
    b"../x",
    b"../canary/secret",
    b"d/../../canary/secret",
    b"/etc/x",
    b"/",
    b".",
    b"./x",
    b"d//x",
    b"d/",
    b"",
    b"x\0y",
    b"d/..",
    b"n" * 256,
    b"/".join([b"p"] * 2000),
    b"x" * 60000,
    b"no/parent",
]
SHAPES = {
    "link": entry(LINK, b"l", b"/etc/passwd"),
    "link then file through it": entry(LINK, b"l", b"../canary") + entry(FILE, b"l/secret", b"x"),
    "unknown kind": entry(4, b"x"),
    "device": entry(255, b"x", mode=0o60644),
    "directory with content": entry(FOLDER, b"dir", b"content"),
    "huge": header(FILE, b"x", 1 << 40),
    "as if negative": header(FILE, b"x", (1 << 64) - 1),
    "long name": header(FILE, b"", 0, length=65535),
    "file twice": entry(FILE, b"x", b"1") + entry(FILE, b"x", b"2"),
    "directory twice": entry(FOLDER, b"x") + entry(FOLDER, b"x"),
    "file then directory": entry(FILE, b"x") + entry(FOLDER, b"x") + entry(FILE, b"x/y"),
    "directory then file": entry(FOLDER, b"x") + entry(FILE, b"x"),
    "file as directory": entry(FILE, b"x") + entry(FILE, b"x/y"),
    "odd end": ENTRY.pack(END, 1, 0, 0),
    "end with name": entry(END, b"x"),
    "garbage": b"\x7fELF" * 100,
    "bytes after the end": THE_END + b"x",
    "tree after the end": THE_END + entry(FILE, b"x", b"1") + THE_END,
    "more than the limit": entry(FILE, b"x", bytes(1001)),
    "more than the limit together": entry(FILE, b"x", bytes(600)) + entry(FILE, b"y", bytes(600)),
    "more entries": b"".join(entry(FILE, b"%d" % number) for number in range(101)),
}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("path", PATHS, ids=range(len(PATHS)))
@pytest.mark.parametrize("kind", [FILE, FOLDER])
def test_paths_that_are_not_plain_are_refused(
    place: Path, kind: int, path: bytes, existing: bool
) -> None:
    before = tree_hash(place)
    stream = entry(FOLDER, b"d") + entry(kind, path) + THE_END
    with pytest.raises(SandboxPathError):
        unpack(stream, place if existing else place / "new")
    assert tree_hash(place) == before


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_hostile_streams_are_refused_and_leave_nothing(
    place: Path, shape: str, existing: bool
) -> None:
    destination = place if existing else place / "new"
    with pytest.raises(SandboxFileError):
        unpack(SHAPES[shape] + THE_END, destination, max_bytes=1000, max_entries=100)
    assert os.listdir(place) == []


def test_every_cut_of_a_stream_is_an_error(place: Path) -> None:
    stream = entry(FOLDER, b"d") + entry(FILE, b"d/x", b"abc") + THE_END
    for length in range(len(stream)):
        with pytest.raises(SandboxFileError):
            unpack(stream[:length], place / "new")
    assert os.listdir(place) == []


def test_modes_are_masked(place: Path) -> None:
    stream = entry(FOLDER, b"d", mode=0o7777) + entry(FILE, b"d/x", mode=0o7777) + THE_END
    unpack(stream, place / "new")
    assert stat.S_IMODE((place / "new" / "d").stat().st_mode) == 0o755
    assert stat.S_IMODE((place / "new" / "d" / "x").stat().st_mode) == 0o755


def test_a_hundred_thousand_entries_are_stopped_at_the_limit(place: Path) -> None:
    stream = b"".join(entry(FOLDER, b"%d" % number) for number in range(100_000))
    with pytest.raises(SandboxFileError, match="more than 500"):
        unpack(stream + THE_END, place / "new", max_entries=500)
    assert os.listdir(place) == []


@pytest.mark.timeout(120)
def test_exactly_the_limit_is_allowed(place: Path) -> None:
    stream = b"".join(entry(FILE, b"%d" % number) for number in range(20_000))
    assert unpack(stream + THE_END, place / "new", max_entries=20_000) == 20_000
    assert len(os.listdir(place / "new")) == 20_000


def test_links_in_the_destination_are_not_followed(place: Path, canary: Path) -> None:
    (place / "d").symlink_to(canary)
    (place / "secret").symlink_to(canary / "secret")
    unpack(entry(FILE, b"secret", b"new") + THE_END, place)
    assert not (place / "secret").is_symlink()
    for stream in (
        entry(FOLDER, b"d") + entry(FILE, b"d/secret", b"new"),
        entry(FOLDER, b"d") + entry(FOLDER, b"d/sub") + entry(FILE, b"d/sub/file", b"new"),
    ):
        with pytest.raises(SandboxFileError):
            unpack(stream + THE_END, place)
    with pytest.raises(SandboxFileError):
        unpack(entry(FILE, b"secret") + THE_END, place / "d")
    assert sorted(os.listdir(place)) == ["d", "secret"]


def test_a_file_and_a_directory_do_not_replace_each_other(place: Path) -> None:
    (place / "file").touch()
    (place / "folder" / "x").mkdir(parents=True)
    with pytest.raises(SandboxFileError):
        unpack(entry(FOLDER, b"file") + entry(FILE, b"file/x") + THE_END, place)
    with pytest.raises(SandboxFileError):
        unpack(entry(FILE, b"folder") + THE_END, place)
    with pytest.raises(SandboxFileError):
        unpack(THE_END, place / "file")
    assert sorted(os.listdir(place)) == ["file", "folder"]


PARTS = st.sampled_from([b"a", b"b", b"..", b".", b"", b"link", b"d", b"\xff", b"canary", b"x\0"])
NAMES = st.lists(PARTS, max_size=4).map(b"/".join)
ENTRIES = st.builds(
    lambda kind, name, content, mode, lie: (
        ENTRY.pack(kind, mode, len(name), max(0, len(content) + lie)) + name + content
    ),
    st.sampled_from([FILE, FILE, FOLDER, FOLDER, LINK, END, 7]),
    NAMES,
    st.binary(max_size=8),
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 0, 0, 0, -1, 1, 1 << 33]),
)
STREAMS = st.one_of(
    st.binary(max_size=200),
    st.lists(ENTRIES, max_size=8).map(b"".join).map(lambda stream: stream + THE_END),
    st.lists(ENTRIES, max_size=8).map(b"".join),
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STREAMS, st.booleans(), st.integers(1, 64))
def test_no_stream_touches_anything_else(
    place: Path, canary: Path, stream: bytes, existing: bool, step: int
) -> None:
    before = tree_hash(canary)
    inside = place / "inside"
    if existing and not inside.exists():
        (inside / "d").mkdir(parents=True)
        (inside / "link").symlink_to(canary)
        (inside / "d" / "link").symlink_to("../../../canary")
    destination = inside if existing else place / "new"
    around = sorted(set(os.listdir(place)) - {"new", "inside"})
    try:
        unpack(stream, destination, step=step, max_bytes=100, max_entries=10)
    except SandboxFileError:
        pass
    assert tree_hash(canary) == before
    assert sorted(set(os.listdir(place)) - {"new", "inside"}) == around
    for path in place.rglob("*"):
        status = path.lstat()
        assert not status.st_mode & 0o7022 or path.is_symlink()
        assert not path.name.startswith(".paracle-")
        if path.is_symlink():
            assert path.name == "link"


# Races on the host: a process that can write in the destination swaps its files


@contextlib.contextmanager
def exchanging(*pairs: tuple[Path, str]) -> Iterator[None]:
    """Start another process that swaps names all the time. A pattern stands for what it finds."""
    renameat2 = ctypes.CDLL(None).renameat2
    parent, swapper = os.getpid(), os.fork()
    if swapper == 0:
        while os.getppid() == parent:
            for one, pattern in pairs:
                with contextlib.suppress(Exception):
                    for other in one.parent.glob(pattern):
                        names = os.fsencode(one), os.fsencode(other)
                        renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)


@pytest.mark.timeout(60)
def test_swapping_directories_for_links_never_leads_out(place: Path, canary: Path) -> None:
    (place / "d" / "sub").mkdir(parents=True)
    (place / "d" / "sub" / "there").touch()
    os.symlink(canary, place / "swap")
    stream = (
        entry(FOLDER, b"d")
        + entry(FILE, b"d/secret", b"overwritten")
        + entry(FOLDER, b"d/sub")
        + entry(FILE, b"d/sub/file", b"overwritten")
        + THE_END
    )
    before = tree_hash(canary)
    with exchanging((place / "swap", "d"), (place / "swap", ".paracle-*/d")):
        for _ in range(1000):
            try:
                unpack(stream, place, step=16)
            except SandboxFileError:
                continue
            finally:
                if not os.path.lexists(place / "swap"):
                    os.symlink(canary, place / "swap")
    assert tree_hash(canary) == before


@pytest.mark.timeout(60)
def test_packing_while_directories_are_swapped_reads_nothing_else(
    place: Path, canary: Path
) -> None:
    (place / "d" / "sub").mkdir(parents=True)
    (place / "d" / "sub" / "file").write_text("decoy")
    os.symlink(canary, place / "swap")
    seen = 0
    with exchanging((place / "swap", "d")):
        for _ in range(1500):
            stream = bytearray()
            try:
                for piece in pack(place):
                    stream += piece
                seen += 1
            except SandboxFileError:
                pass
            assert b"host-only" not in stream
            assert b"secret" not in stream
    assert seen


# One file


def test_a_file_replaces_the_old_one_when_whole(place: Path) -> None:
    target = place / "new" / "file"
    sink = FileSink(target, max_bytes=10)
    sink.feed(b"12345")
    assert not target.exists()
    sink.feed(b"67890")
    assert sink.finish(0o6777) == 10
    assert target.read_bytes() == b"1234567890"
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    sink.abort()
    assert target.exists()
    empty = FileSink(target, max_bytes=0)
    assert empty.finish() == 0
    assert target.read_bytes() == b""
    assert os.listdir(target.parent) == ["file"]


def test_a_file_that_is_too_large_leaves_the_old_one(place: Path) -> None:
    (place / "file").write_text("old")
    sink = FileSink(place / "file", max_bytes=10)
    sink.feed(b"12345")
    with pytest.raises(SandboxFileError, match="larger"):
        sink.feed(b"678901")
    with pytest.raises(SandboxFileError):
        sink.feed(b"6")
    with pytest.raises(SandboxFileError):
        sink.finish()
    assert (place / "file").read_text() == "old"
    assert os.listdir(place) == ["file"]


def test_an_aborted_file_leaves_nothing(place: Path) -> None:
    sink = FileSink(place / "file", max_bytes=10)
    sink.feed(b"12345")
    sink.abort()
    assert os.listdir(place) == []


def test_a_link_at_the_destination_is_replaced(place: Path, canary: Path) -> None:
    (place / "link").symlink_to(canary / "secret")
    sink = FileSink(place / "link", max_bytes=10)
    sink.feed(b"mine")
    sink.finish()
    assert not (place / "link").is_symlink()
    assert (place / "link").read_bytes() == b"mine"


def test_a_directory_at_the_destination_is_an_error(place: Path) -> None:
    (place / "folder").mkdir()
    for target in (place / "folder", Path("/")):
        sink = FileSink(target, max_bytes=10)
        with pytest.raises(SandboxFileError):
            sink.feed(b"x")
            sink.finish()
    assert os.listdir(place) == ["folder"]
