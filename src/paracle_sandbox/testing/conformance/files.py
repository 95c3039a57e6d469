"""Checks of files: read, write, list, move and remove them, but never outside the sandbox."""

from __future__ import annotations

import asyncio
import errno

from ...errors import (
    SandboxFileDecodeError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxPathError,
)
from ...sandbox.sandbox import Sandbox
from .case import Case
from .expect import contains, equal, expect, raises
from .registry import check

ODD_NAMES = (
    "with space.txt", "it's", 'say "hi".md', "-rf", "$HOME", "a;b&c|d", "*", "[x]", "back\\slash",
    "été €😀.txt", " lead", "trail ", "new\nline", "~", "%s", ".hidden", "EOF", "x" * 255,
)  # fmt: skip


async def _list_names(sandbox: Sandbox, path: str = ".") -> list[str]:
    return sorted(entry["name"] for entry in await sandbox.list_files(path))


@check(quick=True)
async def write_then_read(case: Case) -> None:
    """Text comes back as it was, and programs see it."""
    sandbox = await case.sandbox()
    text = "first\n\nEOF\n$HOME 'q' \"d\" `x`\nlast without newline é€😀"
    await sandbox.write_file("notes.txt", text)
    equal(await sandbox.read_file("notes.txt"), text)
    equal(await sandbox.run_command("cat notes.txt"), text)
    await sandbox.write_file("notes.txt", "")
    equal(await sandbox.read_file("notes.txt"), "")


@check()
async def bytes_come_back(case: Case) -> None:
    """Any bytes survive; read as text they are refused, or replaced on request."""
    sandbox = await case.sandbox()
    data = bytes(range(256)) * 33 + b"\xff\xfe\0"
    await sandbox.write_file("data.bin", data)
    equal(await sandbox.read_bytes("data.bin"), data)
    equal(await sandbox.read_file("data.bin", encoding=None), data)
    replaced = await sandbox.read_file("data.bin", errors="replace")
    equal(replaced, data.decode("utf-8", "replace"))
    error = await raises(SandboxFileDecodeError, sandbox.read_file("data.bin"))
    expect("read_bytes" in str(error) and error.start == 128, f"{error} at {error.start}")


@check()
async def parents_are_made(case: Case) -> None:
    """Writing makes the directories it needs."""
    sandbox = await case.sandbox()
    await sandbox.write_file("a/b/c/file.txt", "deep")
    equal(await sandbox.read_file("a/b/c/file.txt"), "deep")
    equal(await sandbox.run_command("cat a/b/c/file.txt"), "deep")


@check()
async def absolute_paths(case: Case) -> None:
    """Absolute paths below the working directory and /tmp name the same files."""
    sandbox = await case.sandbox()
    await sandbox.write_file(f"{sandbox.config.working_dir}/here", "here")
    equal(await sandbox.read_file("here"), "here")
    folder = f"/tmp/paracle-{sandbox.sandbox_id}"
    await sandbox.write_file(f"{folder}/there", "there")
    equal(await sandbox.run_command(["cat", f"{folder}/there"]), "there")
    await sandbox.remove(folder, recursive=True)


@check()
async def any_name_is_a_name(case: Case) -> None:
    """Names with spaces, quotes, shell characters, dashes and 255 bytes work everywhere."""
    sandbox = await case.sandbox()
    for name in ODD_NAMES:
        await sandbox.write_file(f"dir/{name}", name)
    await sandbox.mkdir("moved")
    equal(await _list_names(sandbox, "dir"), sorted(ODD_NAMES))
    for name in ODD_NAMES:
        equal(await sandbox.read_file(f"dir/{name}"), name)
        await sandbox.move(f"dir/{name}", f"moved/{name}")
        equal(await sandbox.run_command(["cat", "--", f"moved/{name}"]), name)
        await sandbox.remove(f"moved/{name}")
    equal(await _list_names(sandbox, "moved"), [])


@check()
async def missing_is_not_found(case: Case) -> None:
    """Every operation on what is not there says "not found", as a FileNotFoundError."""
    sandbox = await case.sandbox()
    for begin in (
        sandbox.read_file, sandbox.read_bytes, sandbox.stat, sandbox.list_files, sandbox.remove,
        lambda path: sandbox.move(path, "x"),
        lambda path: sandbox.copy_from(path, case.directory / "none"),
    ):  # fmt: skip
        await raises(SandboxFileNotFoundError, begin("no/dir/none"))
        error = await raises(SandboxFileNotFoundError, begin("none"))
        expect(isinstance(error, FileNotFoundError), "it is no FileNotFoundError")
        contains(str(error).lower(), "not found")
    equal(await sandbox.exists("none"), False)
    expect(not (case.directory / "none").exists(), "copy_from() made a file")


@check()
async def names_are_exact(case: Case) -> None:
    """A name is not a pattern, and not nearly a name: removing an inexact one fails."""
    sandbox = await case.sandbox()
    await sandbox.write_file("report.txt", "kept")
    for name in ("report", "report.tx?", "*", "REPORT.TXT", "report.txt ", "eport.txt"):
        await raises(SandboxFileNotFoundError, sandbox.remove(name))
    equal(await _list_names(sandbox), ["report.txt"])


@check()
async def directories(case: Case) -> None:
    """mkdir with and without parents; remove refuses a directory that is not empty."""
    sandbox = await case.sandbox()
    await sandbox.mkdir("one/two/three")
    await sandbox.mkdir("one/two/three")
    await raises(SandboxFileNotFoundError, sandbox.mkdir("four/five", parents=False))
    await raises(SandboxFileError, sandbox.mkdir("one", parents=False))
    await sandbox.write_file("one/two/file", "x")
    await raises(SandboxFileError, sandbox.remove("one/two"))
    equal(await sandbox.read_file("one/two/file"), "x")
    await sandbox.remove("one/two/three")
    await sandbox.remove("one", recursive=True)
    equal(await _list_names(sandbox), [])


@check()
async def move_renames(case: Case) -> None:
    """move() renames files and directories, also into another one, and replaces a file."""
    sandbox = await case.sandbox()
    await sandbox.write_file("old.txt", "text")
    await raises(SandboxFileNotFoundError, sandbox.move("old.txt", "new/place.txt"))
    await sandbox.mkdir("new")
    await sandbox.move("old.txt", "new/place.txt")
    equal(await sandbox.exists("old.txt"), False)
    equal(await sandbox.read_file("new/place.txt"), "text")
    await sandbox.move("new", "newer")
    equal(await sandbox.read_file("newer/place.txt"), "text")
    await sandbox.write_file("other", "other")
    await sandbox.move("other", "newer/place.txt")
    equal(await sandbox.read_file("newer/place.txt"), "other")


@check()
async def listing_and_stat(case: Case) -> None:
    """Entries have name, kind, size, mode and time; recursive goes all the way down."""
    sandbox = await case.sandbox()
    await sandbox.write_file("dir/sub/file", "12345")
    await sandbox.execute("chmod 640 dir/sub/file; ln -s dir link; mkdir empty")
    kinds = {entry["name"]: entry["kind"] for entry in await sandbox.list_files()}
    equal(kinds, {"dir": "directory", "link": "link", "empty": "directory"})
    deep = {entry["path"].removeprefix(sandbox.config.working_dir).lstrip("/"): entry
            for entry in await sandbox.list_files(".", recursive=True)}  # fmt: skip
    expect(any(path.endswith("dir/sub/file") for path in deep), f"paths are {sorted(deep)}")
    info = await sandbox.stat("dir/sub/file")
    equal((info["name"], info["kind"], info["size"]), ("file", "file", 5))
    equal(info["mode"] & 0o777, 0o640, "mode")
    expect(info["modified"] > 1e9, f"modified is {info['modified']}")
    equal((await sandbox.stat("link"))["kind"], "directory", "stat of a link")


@check()
async def real_paths(case: Case) -> None:
    """realpath follows links wherever they are in a path, and needs no file at its end."""
    sandbox = await case.sandbox()
    await sandbox.execute("mkdir -p a/b; ln -s a/b link; ln -s /tmp out; echo x >a/b/file")
    top = await sandbox.realpath(".")
    equal(await sandbox.realpath("link/file"), f"{top}/a/b/file")
    equal(await sandbox.realpath("a/../link/../new"), f"{top}/new")
    equal(await sandbox.realpath("link"), f"{top}/a/b")
    equal(await sandbox.realpath("out/x"), "/tmp/x")
    await raises(SandboxFileNotFoundError, sandbox.realpath("none/x"))
    await raises(SandboxPathError, sandbox.realpath("/etc"))


@check()
async def a_directory_of_thousands(case: Case) -> None:
    """A directory of 3000 files is listed whole."""
    sandbox = await case.sandbox()
    await sandbox.execute("mkdir many; cd many; for i in $(seq 3000); do : >$i; done")
    equal(await _list_names(sandbox, "many"), sorted(str(n) for n in range(1, 3001)))
    await sandbox.remove("many", recursive=True)


@check()
async def wrong_kinds_are_told(case: Case) -> None:
    """Each file error is of the kind that Python has for it, with errno and filename."""
    sandbox = await case.sandbox()
    await sandbox.write_file("dir/file", "x")
    long = "y" * 256
    for kind, number, path, work in (
        (IsADirectoryError, errno.EISDIR, "dir", sandbox.read_file("dir")),
        (IsADirectoryError, errno.EISDIR, "dir", sandbox.write_file("dir", "x")),
        (NotADirectoryError, errno.ENOTDIR, "dir/file", sandbox.list_files("dir/file")),
        (NotADirectoryError, errno.ENOTDIR, "dir/file/x", sandbox.write_file("dir/file/x", "x")),
        (FileExistsError, errno.EEXIST, "dir", sandbox.mkdir("dir", parents=False)),
        (FileNotFoundError, errno.ENOENT, "none", sandbox.read_file("none")),
        (SandboxFileError, errno.ENOTEMPTY, "dir", sandbox.remove("dir")),
        (SandboxFileError, errno.ENAMETOOLONG, long, sandbox.write_file(long, "x")),
    ):
        error = await raises(SandboxFileError, work)
        equal((error.errno, error.filename), (number, path))
        expect(isinstance(error, kind), f"{error!r} is no {kind.__name__}")
    equal(await sandbox.read_file("dir/file"), "x")


@check()
async def a_file_is_written_as_a_program_would(case: Case) -> None:
    """Links are followed and stay, read-only files are refused, and modes stay as they are."""
    sandbox = await case.sandbox()
    await sandbox.execute(
        "mkdir dir; echo old >dir/real; chmod 750 dir/real; ln -s dir/real link; ln -s dir/new new;"
        "echo kept >locked; chmod 444 locked; ln -s locked to-locked; ln -s /etc/out out"
    )
    await sandbox.write_file("link", "through")
    await sandbox.write_file("new", "made")
    if (await sandbox.execute("printf '' >>locked"))["exit_code"]:  # root may do everything
        for path in ("locked", "to-locked"):
            error = await raises(PermissionError, sandbox.write_file(path, "x"))
            equal(error.errno, errno.EACCES)
    await raises(SandboxPathError, sandbox.write_file("out", "x"))
    seen = "cat dir/real dir/new locked; stat -c '%F %a' link new dir/real locked"
    equal(
        await sandbox.run_command(seen),
        "throughmadekept\nsymbolic link 777\nsymbolic link 777\n"
        "regular file 750\nregular file 444\n",
    )


@check()
async def what_is_too_large_is_not_read(case: Case) -> None:
    """A file of holes is refused by its size, before any of it is sent."""
    sandbox = await case.sandbox()
    await sandbox.execute("truncate -s 1T holes")
    error = await raises(SandboxFileError, sandbox.read_file("holes"))
    equal(error.errno, errno.EFBIG)


@check()
async def special_files_do_not_hang(case: Case) -> None:
    """Reading a FIFO answers with an error instead of waiting for a writer."""
    sandbox = await case.sandbox()
    await sandbox.execute("mkfifo pipe")
    await raises(SandboxFileError, sandbox.read_file("pipe"))
    await raises(SandboxFileError, sandbox.copy_from("pipe", case.directory / "pipe"))


@check(quick=True)
async def paths_that_leave_are_refused(case: Case) -> None:
    """``..`` and absolute paths outside are a SandboxPathError, for every operation."""
    sandbox = await case.sandbox()
    await sandbox.write_file("ours", "x")
    for path in ("..", "../x", "a/../../x", "/etc/passwd", "/", "/tmp/../etc/passwd",
                 "/workspace2/x", "/proc/1/environ", "", "a\0b"):  # fmt: skip
        for begin in (
            sandbox.read_file, sandbox.list_files, sandbox.stat, sandbox.mkdir,
            lambda path: sandbox.write_file(path, "x"),
            lambda path: sandbox.remove(path, recursive=True),
            lambda path: sandbox.move("ours", path),
            lambda path: sandbox.copy_from(path, case.directory / "out"),
        ):  # fmt: skip
            error = await raises(SandboxPathError, begin(path))
            expect(isinstance(error, ValueError), "it is no ValueError")
    equal(await sandbox.read_file("ours"), "x")
    equal(await sandbox.read_file("a/../ours"), "x", "a path that only looks like leaving")


@check(needs=("identity",))
async def places_that_were_made_writable(case: Case) -> None:
    """read_only_filesystem=False makes files of /home and similar directories reachable."""
    sandbox = await case.sandbox(read_only_filesystem=False)
    await sandbox.execute("mkdir /opt/dir; ln -s /opt/dir link; ln -s ../etc /srv/out")
    for path in ("/home/a/file", "/mnt/file", "link/file"):
        await sandbox.write_file(path, path)
        equal(await sandbox.run_command(["cat", path]), path)
    equal([entry["path"] for entry in await sandbox.list_files("/opt", recursive=True)],
          ["/opt/dir", "/opt/dir/file"])  # fmt: skip
    for path in ("/srv/out/passwd", "/usr/x", "/home/../etc/passwd"):
        await raises(SandboxPathError, sandbox.read_file(path))
    tight = await case.sandbox()
    await raises(SandboxPathError, tight.write_file("/home/file", "x"))


@check()
async def links_that_leave_are_refused(case: Case) -> None:
    """A link that leads out is not followed, be it a file, a directory or a chain."""
    sandbox = await case.sandbox()
    await sandbox.execute(
        "ln -s /etc/passwd file; ln -s /etc dir; ln -s ../../etc up; ln -s dir chain;"
        "ln -s / root; mkdir inside; ln -s inside good; echo fine >inside/x"
    )
    outside = ("file", "dir/passwd", "up/passwd", "chain/passwd", "root/etc/passwd")
    for path in outside:
        await raises(SandboxPathError, sandbox.read_file(path))
        await raises(SandboxPathError, sandbox.copy_from(path, case.directory / "out"))
    for path in ("dir/new", "chain/new", "root/new"):
        await raises(SandboxPathError, sandbox.write_file(path, "x"))
    equal(await sandbox.read_file("good/x"), "fine\n", "a link that stays inside")
    await sandbox.remove("dir")
    equal(await sandbox.exists("inside/x"), True)


@check()
async def removing_a_tree_follows_no_link(case: Case) -> None:
    """Removing a directory removes the links in it, not what they lead to."""
    sandbox = await case.sandbox()
    await sandbox.write_file("kept/file", "x")
    await sandbox.execute("mkdir doomed; ln -s ../kept doomed/link")
    await sandbox.remove("doomed", recursive=True)
    equal(await sandbox.read_file("kept/file"), "x")


@check()
async def a_write_is_whole_or_not_at_all(case: Case) -> None:
    """A reader sees the old content or the new, never a part, while a file is replaced."""
    sandbox = await case.sandbox()
    size = 1 << 20
    await sandbox.write_file("state", b"a" * size)
    writes = asyncio.create_task(_write_often(sandbox, size))
    while not writes.done():
        data = await sandbox.read_bytes("state")
        expect(data in (b"a" * size, b"b" * size), f"a torn file of {len(data)} bytes")
    await writes


async def _write_often(sandbox: Sandbox, size: int) -> None:
    for number in range(10):
        await sandbox.write_file("state", (b"b" if number % 2 else b"a") * size)


@check()
async def files_belong_to_the_user_inside(case: Case) -> None:
    """Programs inside may change and remove files that the host writes, and vice versa."""
    sandbox = await case.sandbox()
    await sandbox.write_file("dir/ours", "x")
    await sandbox.run_code("open('dir/ours', 'a').write('y'); open('dir/theirs', 'w').write('z')")
    equal(await sandbox.read_file("dir/ours"), "xy")
    await sandbox.write_file("dir/theirs", "changed")
    equal((await sandbox.execute("rm -r dir"))["exit_code"], 0)
