"""Checks of copies between the host and a sandbox: files and trees, large and hostile ones."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

from ...errors import SandboxFileError, SandboxFileNotFoundError, SandboxPathError
from .case import Case
from .expect import contains, equal, expect, raises
from .registry import check

_LARGE = 50 << 20


def _make_tree(root: Path) -> None:
    (root / "sub/deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "it's a file").write_text("quoted")
    (root / "sub/data.bin").write_bytes(bytes(range(256)))
    (root / "sub/deep/none").write_bytes(b"")
    (root / "sub/run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "sub/run.sh").chmod(0o755)


def _read_tree(root: Path) -> dict[str, bytes | None]:
    """Return every path below, with the bytes of files and None for directories."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@check()
async def a_file_there_and_back(case: Case) -> None:
    """A file keeps its bytes and its mode through copy_to() and copy_from()."""
    sandbox = await case.sandbox()
    source = case.directory / "tool"
    source.write_bytes(b"#!/bin/sh\necho ran\n")
    source.chmod(0o755)
    await sandbox.copy_to(source, "bin/tool")
    equal(await sandbox.run_command("./bin/tool"), "ran\n")
    await sandbox.copy_from("bin/tool", case.directory / "back")
    equal((case.directory / "back").read_bytes(), source.read_bytes())
    expect(os.access(case.directory / "back", os.X_OK), "it is not executable any more")


@check()
async def copies_keep_their_name(case: Case) -> None:
    """Into ``dir/`` and into an existing directory of the host, a file keeps its name."""
    sandbox = await case.sandbox()
    source = case.directory / "name.txt"
    source.write_text("text")
    await sandbox.copy_to(str(source), "dir/")
    equal(await sandbox.read_file("dir/name.txt"), "text")
    target = case.directory / "target"
    target.mkdir()
    await sandbox.copy_from("dir/name.txt", target)
    equal((target / "name.txt").read_text(), "text")


@check()
async def a_tree_there_and_back(case: Case) -> None:
    """Directories come back equal: empty ones, binary files and modes included."""
    sandbox = await case.sandbox()
    source = case.directory / "tree"
    _make_tree(source)
    await sandbox.copy_to(source, "copy")
    equal(await sandbox.run_command("./copy/sub/run.sh"), "ran\n")
    await sandbox.copy_from("copy", case.directory / "back")
    equal(_read_tree(case.directory / "back"), _read_tree(source))
    expect(os.access(case.directory / "back/sub/run.sh", os.X_OK), "it is not executable any more")


@check()
async def fifty_megabytes_there_and_back(case: Case) -> None:
    """A large file survives the round trip; its hash is the same on both sides and inside."""
    sandbox = await case.sandbox()
    source = case.directory / "large"
    with source.open("wb") as file:
        numbers = random.Random(50)  # noqa: S311 (any bytes will do, the same each time)
        for _ in range(50):
            file.write(numbers.randbytes(_LARGE // 50))
    await sandbox.copy_to(source, "large")
    inside = (await sandbox.run_command("sha256sum large", timeout=200)).split()[0]
    equal(inside, _hash_file(source), "hash inside")
    await sandbox.copy_from("large", case.directory / "back")
    equal(_hash_file(case.directory / "back"), _hash_file(source), "hash of the copy")


@check()
async def what_is_missing_is_not_found(case: Case) -> None:
    """A missing source is not found, on either side, and makes nothing."""
    sandbox = await case.sandbox()
    error = await raises(SandboxFileNotFoundError, sandbox.copy_to(case.directory / "no", "x"))
    contains(str(error).lower(), "not found")
    equal(await sandbox.exists("x"), False)
    await raises(SandboxFileNotFoundError, sandbox.copy_from("no", case.directory / "x"))
    expect(not (case.directory / "x").exists(), "a file was made")


@check()
async def copies_stay_inside(case: Case) -> None:
    """copy_to() outside the working directory, or through a link that leaves, is refused."""
    sandbox = await case.sandbox()
    source = case.directory / "file"
    source.write_text("x")
    await sandbox.execute("ln -s /etc out; ln -s /usr usr")
    for path in ("../x", "/etc/x", "/usr/", "out/x", "usr/"):
        await raises(SandboxPathError, sandbox.copy_to(source, path))
    tree = case.directory / "tree"
    _make_tree(tree)
    await raises(SandboxPathError, sandbox.copy_to(tree, "out/tree"))


@check()
async def links_do_not_reach_the_host(case: Case) -> None:
    """Links and special files of a tree are left out of the copy; the rest arrives."""
    sandbox = await case.sandbox()
    await sandbox.execute(
        "mkdir t; cd t; echo x >real; ln -s /etc/passwd link; ln -s .. up; mkfifo pipe;"
        "ln -s real inner"
    )
    await sandbox.copy_from("t", case.directory / "t")
    equal(_read_tree(case.directory / "t"), {"real": b"x\n"})


@check()
async def copies_out_are_bounded(case: Case) -> None:
    """A copy larger, or of more entries, than allowed is refused and leaves nothing."""
    sandbox = await case.sandbox()
    await sandbox.execute("mkdir t; for i in 1 2 3 4 5; do head -c 100000 /dev/zero >t/$i; done")
    target = case.directory / "t"
    await raises(SandboxFileError, sandbox.copy_from("t", target, max_bytes=300_000))
    await raises(SandboxFileError, sandbox.copy_from("t", target, max_entries=3))
    await raises(SandboxFileError, sandbox.copy_from("t/1", target, max_bytes=1000))
    equal(list(case.directory.iterdir()), [], "what was left on the host")
    await sandbox.copy_from("t", target, max_bytes=500_000, max_entries=6)
    equal(len(_read_tree(target)), 5)


@check()
async def a_sparse_giant_does_not_fill_the_host(case: Case) -> None:
    """A file that claims a terabyte is refused by the limit, not written."""
    sandbox = await case.sandbox()
    made = await sandbox.execute("truncate -s 1T giant")
    if made["exit_code"]:
        return  # no such file can be made here, so there is nothing to refuse
    target = case.directory / "giant"
    await raises(SandboxFileError, sandbox.copy_from("giant", target, max_bytes=1 << 20))
    equal(list(case.directory.iterdir()), [], "what was left on the host")
