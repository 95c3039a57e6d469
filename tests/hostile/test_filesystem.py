"""F. Filesystem escape and copy races. Nothing of the host may be read or written, ever."""

# ruff: noqa: E501  (the programs that run inside are text)
from __future__ import annotations

import asyncio
import json
import os
import secrets
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import oracles
import pytest
from hostile_fixtures import Make
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from liars import LyingChannel
from oracles import Canary, CanaryTree
from probes import report

import paracle_sandbox
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.channel import frames
from paracle_sandbox.errors import SandboxError, SandboxFileError, SandboxPathError
from paracle_sandbox.sandbox.host_copy import Unpacker
from paracle_sandbox.sandbox.sandbox import Sandbox

READ_HOST = """
import glob, json, os
target = %r
content = []
def attempt(path):
    try:
        with open(path, "rb") as file:
            content.append(file.read(4096).decode("latin-1"))
    except OSError:
        pass
tail = target.lstrip("/")
attempt(target)
attempt("../" * 64 + tail)
for pid in ["self", "1", "thread-self", *filter(str.isdigit, os.listdir("/proc"))]:
    for way in ("root", "cwd"):
        attempt("/proc/%%s/%%s/%%s" %% (pid, way, tail))
        attempt("/proc/%%s/%%s/%%s%%s" %% (pid, way, "../" * 64, tail))
    for path in glob.glob("/proc/%%s/fd/*" %% pid) + glob.glob("/proc/%%s/map_files/*" %% pid):
        if os.path.isdir(path):
            attempt("%%s/%%s%%s" %% (path, "../" * 64, tail))
for fd in range(64):
    attempt("/dev/fd/%%d/%%s%%s" %% (fd, "../" * 64, tail))
attempt("/.volume/../" + tail)
attempt("/.proc/1/root/" + tail)
os.symlink(target, "link-%%s" %% os.getpid())
attempt("link-%%s" %% os.getpid())
print(json.dumps(content))
"""


@pytest.mark.case("F01")
async def test_no_path_leads_to_the_host(sandbox: Sandbox, fake: Sandbox, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "flag")
    for parent in canary.path.parents:
        if str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)
    content = await report(sandbox, READ_HOST % str(canary.path))
    assert canary.secret not in content
    canary.assert_intact()
    # The same program where nothing isolates it does read the canary.
    assert canary.secret in await report(fake, READ_HOST % str(canary.path))


OVERWRITE = """
import json, os
wrote = []
paths = ["/proc/self/exe", os.path.realpath("/proc/self/exe")]
for pid in filter(str.isdigit, os.listdir("/proc")):
    paths.append("/proc/%s/exe" % pid)
with open("/proc/self/maps") as maps:
    paths += {line.split()[-1] for line in maps if line.split()[-1].startswith("/")}
for path in paths:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        try:
            fd = os.open(path, flags)
            wrote.append(path)
        except OSError:
            pass
    try:
        # As runc was broken: keep it open, and open it again for writing through the descriptor.
        fd = os.open(path, os.O_PATH)
        os.open("/proc/self/fd/%d" % fd, os.O_WRONLY)
        wrote.append("again " + path)
    except OSError:
        pass
    for action in (lambda: os.chmod(path, 0o777), lambda: os.unlink(path),
                   lambda: os.rename(path, path + ".old"), lambda: os.utime(path, (1, 1))):
        try:
            action()
            wrote.append("changed " + path)
        except OSError:
            pass
print(json.dumps([wrote, len(paths)]))
"""


@pytest.mark.case("F04")
async def test_host_programs_cannot_be_overwritten(
    sandbox: Sandbox, native: NativeBackend, tmp_path: Path
) -> None:
    package = Path(paracle_sandbox.__file__).parent
    files = [Path(sys.executable).resolve(), Path("/usr/bin/env"), *package.rglob("*.py")]
    before = oracles.hash_files(files)
    init = native.init_pid(sandbox.sandbox_id)
    wrote, tried = await report(sandbox, OVERWRITE)
    shell = await sandbox.execute(
        "for i in /proc/[0-9]*/exe; do echo x > $i; cp /bin/true $i; done 2>/dev/null; true"
    )
    assert shell["exit_code"] == 0
    assert wrote == [] and tried > 5
    assert os.path.exists(f"/proc/{init}")
    assert oracles.hash_files(files) == before
    # The probe can fail: a program that owns its own file does open it.
    victim = tmp_path / "victim"
    victim.write_text("x")
    code = OVERWRITE.replace('paths = ["/proc/self/exe"', f'paths = [{str(victim)!r}, "/nothing"')
    code = code.replace("for pid in filter", "for pid in [] and filter").replace(
        'with open("/proc/self/maps") as maps:\n    paths +=', "if 0:\n    paths +="
    ).replace(', os.path.realpath("/proc/self/exe")', "")  # fmt: skip
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await done.communicate()
    assert str(victim) in json.loads(said)[0]


# Links are planted where the manager reads and writes. /dev/shm is inside, but file operations may
# not touch it: a link that reaches it has left the working directory.
PLANT = """
import json, os
os.makedirs("/dev/shm/out/inner", exist_ok=True)
with open("/dev/shm/out/inner/f", "w") as file:
    file.write("OUTSIDE")
os.chmod("/dev/shm/out/inner/f", 0o640)
os.utime("/dev/shm/out/inner/f", (1000, 1000))
for name, target in %r.items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    os.symlink(target, name)
print("null")
"""
LOOK_OUTSIDE = """
import json, os
found = {}
for folder, _, names in os.walk("/dev/shm/out"):
    for name in names:
        path = os.path.join(folder, name)
        s = os.lstat(path)
        found[path] = [open(path).read(), s.st_mode, s.st_mtime, s.st_nlink]
print(json.dumps(found))
"""
UNTOUCHED = {"/dev/shm/out/inner/f": ["OUTSIDE", 0o100640, 1000.0, 1]}


async def _refused(action: Awaitable[object]) -> object:
    try:
        return await action
    except SandboxError:
        return None


@pytest.mark.case("F05", "F09")
async def test_a_link_at_the_target_of_an_upload(sandbox: Sandbox, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "host")
    tree = CanaryTree(tmp_path / "tree")
    source = tmp_path / "source"
    source.write_text("uploaded")
    source.chmod(0o777)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "f").write_text("uploaded")
    links = {
        "x": str(canary.path), "y": "/dev/shm/out/inner/f", "d": "/dev/shm/out", "h": str(tree.root),
        "deep/a": "/dev/shm", "up": "../../dev/shm/out", "proc": "/proc/self/cwd/../dev/shm/out",
        "loop": "loop", "abs": "//dev//shm//out",
    }  # fmt: skip
    await report(sandbox, PLANT % links)
    for name in ("x", "y", "d/inner/f", "h/inner/f", "deep/a/out/inner/f", "up/inner/f", "abs/new",
                 "proc/inner/f", "loop", "d/", "h/"):  # fmt: skip
        await _refused(sandbox.copy_to(source, name))
        await _refused(sandbox.write_file(name, b"written"))
    for name in ("d", "h", "up", "deep/a/out", "x", "abs"):
        await _refused(sandbox.copy_to(folder, name))
        await _refused(sandbox.mkdir(f"{name}/made"))
        await _refused(sandbox.move("y", f"{name}/moved"))
    canary.assert_intact()
    tree.assert_intact()
    assert await report(sandbox, LOOK_OUTSIDE) == UNTOUCHED


@pytest.mark.case("F06")
async def test_a_link_at_the_source_of_a_download(sandbox: Sandbox, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "host")
    links = {
        "out.txt": "/etc/passwd", "canary": str(canary.path), "y": "/dev/shm/out/inner/f",
        "d": "/dev/shm/out", "e": "/etc", "root": "/", "tree/link": "/etc/passwd",
        "tree/dir": "/dev/shm/out", "proc": "/proc/1/environ", "self": "/proc/self/root",
    }  # fmt: skip
    await report(sandbox, PLANT % links)
    await sandbox.write_file("tree/plain", "plain")
    taken = tmp_path / "taken"
    for name in ("out.txt", "canary", "y", "d", "d/inner/f", "e", "e/passwd", "root", "proc", "self",
                 "root/etc/passwd", "self/etc/passwd", "tree/dir", "tree/dir/inner/f"):  # fmt: skip
        with pytest.raises(SandboxError):
            await sandbox.copy_from(name, taken / name.replace("/", "-"))
        with pytest.raises(SandboxError):
            await sandbox.read_file(name)
    await sandbox.copy_from("tree", taken / "tree")
    assert [path.name for path in (taken / "tree").rglob("*")] == ["plain"]
    everything = b"".join(p.read_bytes() for p in taken.rglob("*") if p.is_file())
    assert canary.secret.encode() not in everything and b"OUTSIDE" not in everything
    assert b"root:" not in everything


@pytest.mark.case("F05", "F06")
def test_the_link_oracles_can_fail(tmp_path: Path) -> None:
    """A manager that opens paths in a directory of the workload does touch the canary."""
    canary = Canary(tmp_path / "host")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "x").symlink_to(canary.path)
    assert (workspace / "x").read_text() == canary.secret
    (workspace / "x").write_text("uploaded")
    with pytest.raises(AssertionError):
        canary.assert_intact()


EXCHANGE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("real/inner", exist_ok=True)
with open("real/inner/f", "w") as file:
    file.write("INSIDE")
links = %r
for number, target in enumerate(links):
    os.symlink(target, "link%%d" %% number)
count = 0
print("ready", flush=True)
while not os.path.exists("stop"):
    for _ in range(50):
        for number in range(len(links)):
            name = b"link%%d" %% number
            # Exchange them twice, so that each name is a directory again.
            for _ in range(2):
                libc.renameat2(-100, b"real", -100, name, 2)
                count += 1
print(count)
"""


async def _race(
    sandbox: Sandbox, host: CanaryTree, rounds: Callable[[int], Awaitable[None]], least: int = 100
) -> int:
    """Let the workload exchange a directory with links while ``rounds(n)`` runs.

    Returns how many times it did, which is ``least`` or more.
    """
    await report(sandbox, PLANT % {})
    ready = asyncio.Event()
    links = ["/dev/shm/out", str(host.root)]
    swapping = await sandbox.start_code(
        EXCHANGE % links, on_stdout=lambda text: ready.set(), timeout=110, cwd="/workspace"
    )
    await asyncio.wait_for(ready.wait(), 20)
    loop = asyncio.get_running_loop()
    end = loop.time() + 12
    number = 0
    while loop.time() < end or number < least:
        await rounds(number)
        number += 1
    await sandbox.write_file("stop", "")
    result = await swapping.wait()
    return int(result["stdout"].split()[-1])


@pytest.mark.case("F07")
async def test_copies_race_with_exchanged_directories(
    sandbox: Sandbox, native: NativeBackend, tmp_path: Path
) -> None:
    host = CanaryTree(tmp_path / "host")
    source = tmp_path / "source"
    source.write_text("UPLOADED")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "g").write_text("UPLOADED")
    taken = tmp_path / "taken"
    seen: dict[str, int] = {}

    async def one_round(number: int) -> None:
        for action in (
            sandbox.read_file("real/inner/f"),
            sandbox.copy_to(source, "real/inner/f"),
            sandbox.copy_from("real", taken / str(number)),
            sandbox.copy_to(folder, "real"),
            sandbox.copy_from("real/inner/f", taken / f"f{number}"),
            sandbox.write_file("real/inner/new", b"UPLOADED"),
        ):
            try:
                answer = await action
            except SandboxError:
                answer = "refused"
            seen[str(answer)] = seen.get(str(answer), 0) + 1

    # This makes ten thousand copies with six in a round; engines take longer for each.
    least = 1_700 if native.name == "native" else 100
    count = await _race(sandbox, host, one_round, least)
    assert count >= 10_000
    host.assert_intact()
    assert await report(sandbox, LOOK_OUTSIDE) == UNTOUCHED
    assert set(seen) <= {"INSIDE", "UPLOADED", "None", "refused"}
    assert seen["None"] > 10  # copies did come through
    for path in taken.rglob("*"):
        if path.is_file():
            assert path.read_text() in ("INSIDE", "UPLOADED")


@pytest.mark.case("F08")
async def test_removal_races_with_exchanged_directories(sandbox: Sandbox, tmp_path: Path) -> None:
    host = CanaryTree(tmp_path / "host")

    async def one_round(number: int) -> None:
        await _refused(sandbox.remove("real/inner", recursive=True))
        await _refused(sandbox.write_file("real/inner/deep/f", b"INSIDE"))
        await _refused(sandbox.remove("link0/inner", recursive=True))
        await _refused(sandbox.move("real/inner", f"moved{number}"))
        await _refused(sandbox.remove(f"moved{number}", recursive=True))
        await _refused(sandbox.list_files("real", recursive=True))

    assert await _race(sandbox, host, one_round) >= 10_000
    host.assert_intact()
    assert await report(sandbox, LOOK_OUTSIDE) == UNTOUCHED


@pytest.mark.case("F07", "F08")
async def test_the_race_oracle_can_fail(sandbox: Sandbox, tmp_path: Path) -> None:
    """A manager that opens by path loses to the exchanging program at once."""
    host = CanaryTree(tmp_path / "host")
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "real" / "inner").mkdir(parents=True)
    (place / "link").symlink_to(host.root)
    import ctypes

    libc = ctypes.CDLL(None)
    for _ in range(2):
        real, link = os.fsencode(place / "real"), os.fsencode(place / "link")
        libc.renameat2(-100, real, -100, link, 2)
        (place / "real" / "inner" / "f").write_text("UPLOADED")
    with pytest.raises(AssertionError):
        host.assert_intact()


@pytest.mark.case("F09", "F10")
async def test_modes_and_owners_of_planted_files(sandbox: Sandbox, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "host")
    await report(sandbox, PLANT % {"s": str(canary.path), "t": "/dev/shm/out/inner/f"})
    code = """
import json, os
answers = {}
for source in ("/usr/bin/env", "/etc/passwd", "/dev/shm/out/inner/f", "/proc/self/exe", "/dev/null"):
    for follow in (False, True):
        try:
            os.link(source, "linked", follow_symlinks=follow)
            answers[source] = "OK"
            os.unlink("linked")
        except OSError as error:
            answers[source] = error.errno
with open("mine", "w") as file:
    file.write("mine")
os.link("mine", "hard")
print(json.dumps(answers))
"""
    answers = await report(sandbox, code)
    assert "OK" not in answers.values(), answers
    source = tmp_path / "source"
    source.write_text("new")
    source.chmod(0o777)
    for name in ("s", "t", "hard"):
        await _refused(sandbox.copy_to(source, name))
    canary.assert_intact()
    assert await report(sandbox, LOOK_OUTSIDE) == UNTOUCHED
    assert await sandbox.read_file("mine") == "mine"


# F11: a guest that sends a hostile tree


def _entry(
    kind: int, name: bytes, content: bytes = b"", mode: int = 0o644, size: int = -1
) -> bytes:
    return struct.pack(">BHHQ", kind, mode & 0xFFFF, len(name), len(content) if size < 0 else size) \
        + name + content  # fmt: skip


END = struct.pack(">BHHQ", 0, 0, 0, 0)
HOSTILE_TREES = {
    "parent": _entry(1, b"../escaped", b"x"),
    "deep parent": _entry(2, b"a") + _entry(1, b"a/../../escaped", b"x"),
    "absolute": _entry(1, b"/%s", b"x"),
    "dot": _entry(1, b".", b"x"),
    "double dot": _entry(2, b".."),
    "empty name": _entry(1, b"", b"x"),
    "double slash": _entry(1, b"a//b", b"x"),
    "trailing slash": _entry(1, b"a/", b"x"),
    "nul": _entry(1, b"a\0b", b"x"),
    "link": _entry(3, b"l", b"/etc"),
    "link then file": _entry(3, b"l", b"%s") + _entry(1, b"l/escaped", b"x"),
    "link to itself": _entry(3, b"l", b"l"),
    "device": _entry(4, b"dev"),
    "unknown kind": _entry(255, b"what"),
    "file over directory": _entry(2, b"a") + _entry(1, b"a", b"x"),
    "below a file": _entry(1, b"a", b"x") + _entry(1, b"a/b", b"x"),
    "no parent": _entry(1, b"missing/a", b"x"),
    "huge size": _entry(1, b"a", b"x", size=2**63),
    "negative size": _entry(1, b"a", b"x", size=2**64 - 1),
    "long name": _entry(1, b"n" * 60000, b"x"),
    "long component": _entry(1, b"n" * 256, b"x"),
    "after the end": _entry(1, b"a", b"x") + END + _entry(1, b"../escaped", b"x"),
    "twice": _entry(1, b"a", b"x") + _entry(1, b"a", b"y"),
}


def _scripted(reply: Callable[[LyingChannel, int], None], kind: str = "directory") -> object:
    """Script a guest that knows one path, and answers a copy with ``reply``."""
    entry = {
        "name": "x",
        "path": "/workspace/x",
        "kind": kind,
        "size": 1,
        "mode": 0o644,
        "modified": 0,
    }

    async def script(channel: LyingChannel, frame: int, stream: int, payload: bytes) -> None:
        if frame == frames.OPEN:
            if frames.decode_json(payload)["op"] == "stat":
                channel.say(frames.encode_json(frames.RESULT, stream, entry))
            else:
                reply(channel, stream)

    return script


@pytest.mark.case("F11")
@pytest.mark.parametrize("name", HOSTILE_TREES)
async def test_hostile_trees(name: str, lying: object, tmp_path: Path) -> None:
    tree = CanaryTree(tmp_path / "around")
    data = HOSTILE_TREES[name].replace(b"%s", os.fsencode(str(tree.root))) + END

    def reply(channel: LyingChannel, stream: int) -> None:
        channel.say(frames.encode(frames.DATA, stream, data))
        channel.say(frames.encode_json(frames.RESULT, stream, {"entries": 1, "skipped": 0}))

    sandbox = await lying(_scripted(reply))
    target = tmp_path / "target"
    outcome = await _refused_file(sandbox.copy_from("x", target))
    tree.assert_intact()
    assert not (tmp_path / "escaped").exists()
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert [n for n in left if not n.startswith(("around", "target"))] == []
    for path in target.rglob("*") if target.exists() else ():
        assert not path.is_symlink() and (path.is_file() or path.is_dir())
    if name not in ("twice", "no parent", "double slash", "trailing slash"):
        assert outcome == "refused" and not target.exists()


async def _refused_file(action: Awaitable[object]) -> str:
    try:
        await action
    except SandboxFileError:
        return "refused"
    except SandboxError as error:
        return type(error).__name__
    return "taken"


@pytest.mark.case("F11")
async def test_modes_are_masked_on_the_way_out(lying: object, tmp_path: Path) -> None:
    data = _entry(2, b"d", mode=0o7777) + _entry(1, b"d/f", b"x", mode=0o7777) + END

    def reply(channel: LyingChannel, stream: int) -> None:
        channel.say(frames.encode(frames.DATA, stream, data))
        channel.say(frames.encode_json(frames.RESULT, stream, {"entries": 2}))

    sandbox = await lying(_scripted(reply))
    await sandbox.copy_from("x", tmp_path / "target")
    for path in ("target/d", "target/d/f"):
        assert not (tmp_path / path).stat().st_mode & 0o7000


@pytest.mark.case("F11")
def test_the_number_and_size_of_entries_is_bounded(tmp_path: Path) -> None:
    for limit in (
        {"max_bytes": 1 << 30, "max_entries": 100},
        {"max_bytes": 100, "max_entries": 10**6},
    ):
        unpacker = Unpacker(tmp_path / "target", **limit)
        with pytest.raises(SandboxFileError):
            for number in range(2000):
                unpacker.feed(_entry(1, b"%d" % number, b"0123456789"))
        unpacker.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("F11")
@hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    entries=st.lists(
        st.tuples(
            st.integers(0, 5), st.integers(0, 0xFFFF),
            st.one_of(
                st.binary(max_size=20),
                st.lists(st.sampled_from([b"..", b".", b"", b"a", b"b"])).map(b"/".join),
            ),
            st.binary(max_size=30), st.one_of(st.none(), st.integers(0, 2**64 - 1)),
        ),
        max_size=6,
    ),
    cut=st.integers(0, 40),
)  # fmt: skip
def test_no_stream_of_bytes_gets_out_of_its_target(
    entries: list[tuple[int, int, bytes, bytes, int | None]], cut: int, tmp_path: Path
) -> None:
    place = tmp_path / secrets.token_hex(6)
    tree = CanaryTree(place / "around")
    data = b"".join(
        _entry(kind, name, content, mode, -1 if size is None else size)
        for kind, mode, name, content, size in entries
    )
    data = (data + END)[: max(0, len(data) + len(END) - cut)]
    unpacker = Unpacker(place / "target", max_bytes=1 << 20, max_entries=100)
    try:
        for start in range(0, len(data), 7):
            unpacker.feed(data[start : start + 7])
        unpacker.finish()
    except SandboxFileError:
        pass
    finally:
        unpacker.abort()
    tree.assert_intact()
    names = {path.name for path in place.iterdir()}
    assert names <= {"around", "target"}
    for path in (place / "target").rglob("*"):
        assert path.is_dir() or path.is_file()
        assert not path.is_symlink() and not path.stat().st_mode & 0o7000


@pytest.mark.case("F15", "M14")
async def test_nothing_from_inside_is_loaded_by_the_host(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "pwned"
    evil = f"open({str(marker)!r}, 'w').close()"
    for name in ("sitecustomize.py", "conftest.py", "json.py", "paracle_sandbox.py", "evil.pth",
                 "pyvenv.cfg", "nsswitch.conf", "libnss_files.so.2"):  # fmt: skip
        await sandbox.write_file(name, evil)
    loaded: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("import", "exec", "ctypes.dlopen") and str(tmp_path) in str(arguments):
            loaded.append(str(arguments))

    sys.addaudithook(hook)
    await sandbox.copy_from(".", tmp_path / "out")
    await sandbox.run_code("import json, sys\nprint(json)")
    await sandbox.list_files(".", recursive=True)
    assert (tmp_path / "out" / "sitecustomize.py").is_file()
    assert not marker.exists() and loaded == []
    assert not [m for m in sys.modules.values() if str(tmp_path) in str(getattr(m, "__file__", ""))]


@pytest.mark.case("F18")
async def test_a_working_directory_elsewhere_opens_nothing(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    canary = Canary(tmp_path / "host")
    for cwd in (str(tmp_path), "/", "/etc", "../../..", "/proc/1/root", "/root"):
        try:
            result = await sandbox.execute(f"cat {canary.path}; echo x > {canary.path}; echo y > y",
                                           cwd=cwd)  # fmt: skip
        except SandboxError:
            continue
        assert canary.secret not in result["stdout"] and result["exit_code"] != 0
    for path in ("/etc/passwd", "../etc/passwd", "/", "/dev/shm/x", "/workspace/../etc", "/tmpx",
                 "/workspaces", "/proc/self/environ"):  # fmt: skip
        for action in (
            sandbox.read_file(path),
            sandbox.write_file(path, "x"),
            sandbox.remove(path),
        ):
            with pytest.raises(SandboxPathError):
                await action
    canary.assert_intact()


@pytest.mark.case("F20")
async def test_any_text_as_a_path_stays_inside(sandbox: Sandbox, tmp_path: Path) -> None:
    canary = Canary(tmp_path / "host")
    await report(sandbox, PLANT % {"a": "/dev/shm/out", "b": "..", "c": "/"})
    import random

    parts = ["..", ".", "", "a", "b", "c", "inner", "f", "~", "$HOME", "*", "\\", "\u2025", "\uff0e\uff0e",
             "\udcff", "é", "e\u0301", "\n", "-rf", "\u202e", "%2e%2e", "x" * 300, "dev", "shm", "out",
             "tmp", "workspace", "proc", "self", "root", str(canary.path)]  # fmt: skip
    draw = random.Random(20)
    for _ in range(400):
        path = draw.choice(("", "/", "//", "./", "/workspace/", "/tmp/")) + "/".join(
            draw.choice(parts) for _ in range(draw.randint(1, 7))
        )
        for action in (
            lambda p: sandbox.write_file(p, b"written"),
            lambda p: sandbox.read_file(p),
            lambda p: sandbox.remove(p),
        ):
            try:
                content = await action(path)
            except (SandboxError, ValueError):
                continue
            assert content in (None, "written"), (path, content)
    canary.assert_intact()
    assert await report(sandbox, LOOK_OUTSIDE) == UNTOUCHED


WRITABLE = """
import json, os, stat
found = []
for folder, folders, names in os.walk("/"):
    if folder == "/":
        folders.remove("proc")
    folders[:] = [f for f in folders if os.path.join(folder, f) not in ("/workspace", "/tmp", "/dev/shm")
                  or found.append(os.path.join(folder, f))]
    for name in folders + names:
        path = os.path.join(folder, name)
        if not os.path.islink(path) and os.access(path, os.W_OK, effective_ids=True):
            found.append(path)
processes = []
for folder, folders, names in os.walk("/proc"):
    if folder == "/proc":
        folders[:] = [f for f in folders if not f.isdigit()]
    processes += [os.path.join(folder, n) for n in names + folders
                  if not os.path.islink(os.path.join(folder, n)) and os.access(os.path.join(folder, n), os.W_OK)]
print(json.dumps([sorted(set(found)), sorted(set(processes))]))
"""


@pytest.mark.case("F16", "G02")
async def test_everything_that_can_be_written(make: Make) -> None:
    sandbox = await make()
    found, proc = await report(sandbox, WRITABLE)
    devices = {
        f"/dev/{n}" for n in ("null", "zero", "full", "random", "urandom", "tty", "pts/ptmx")
    }
    assert set(found) - devices == {"/workspace", "/tmp", "/dev/shm"}
    masks = {"/proc/" + name for name in (
        "kcore", "kallsyms", "keys", "key-users", "timer_list", "sched_debug", "config.gz", "cmdline",
        "sysrq-trigger", "partitions", "diskstats", "latency_stats", "interrupts", "softirqs",
        "schedstat", "locks")}  # fmt: skip
    # A masked file is /dev/null, which accepts all writes.
    left = [p for p in proc if p not in masks]
    assert left == [], left
    # The program finds out by trying; on the host nothing grows.
    attempt = await sandbox.execute(
        "for d in / /usr /usr/bin /usr/local /usr/local/bin /etc /dev /run /var /home /opt /srv /mnt"
        " /root /sys /.empty /.volume /.proc; do touch $d/x 2>/dev/null && echo $d; done; true"
    )
    assert attempt["stdout"] == ""
