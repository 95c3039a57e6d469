"""Changes of the user's files are compared without holding up the event loop, over FakeBackend,
however large they are and however hard to compare."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paracle_sandbox.agents.workspace_sync import Change, WorkspaceSync
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.testing.fake import FakeBackend

MANY = 8_000


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    backend = FakeBackend()
    async with Sandbox(backend, "box", SandboxConfig()) as running:
        yield running
    await backend.close()


async def test_the_loop_goes_on_while_many_files_are_compared_and_written(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """The watchdog looks."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "kept.txt").write_text("as it was\n")
    project = WorkspaceSync.gather(folder)
    await project.copy_in(sandbox)
    made = await sandbox.run_code(
        "import os\n"
        "for folder in range(100):\n"
        "    os.mkdir(str(folder))\n"
        f"    for name in range({MANY // 100}):\n"
        "        open(f'{folder}/{name}.txt', 'w').write('new')\n"
    )
    assert made["exit_code"] == 0, made
    try:
        changes = await project.changes(sandbox)
        assert len(changes) == MANY
        assert await project.apply(changes) == []
    finally:
        project.close()
    assert len(list(folder.glob("*/*.txt"))) == MANY


def changed(before: bytes, after: bytes) -> str:
    return Change("file.txt", "changed", before, after).diff()


def test_texts_that_cannot_be_compared_in_time_are_told_by_their_sizes() -> None:
    """A hundred lines in all orders: difflib would take hours."""
    lines = [f"{number * number % 101}\n".encode() for number in range(1, 150_000)]
    before, after = b"".join(lines), b"".join(sorted(lines))
    before, after = before[: 500 << 10], after[: 500 << 10]
    assert changed(before, after) == f"changed file.txt: {len(before)} -> {len(after)} bytes\n"


def test_large_sources_are_compared() -> None:
    """Large sources have many equal lines, and changes in many places."""
    lines = [f"    value = call({number})\n" if number % 5 else "\n" for number in range(15_000)]
    other = ["changed\n" if number % 50 == 1 else line for number, line in enumerate(lines)]
    expected = "".join(difflib.unified_diff(lines, other, "a/file.txt", "b/file.txt"))
    assert changed("".join(lines).encode(), "".join(other).encode()) == expected
    assert expected.count("+changed") == 300
