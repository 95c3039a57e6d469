"""Tests of the paths in a guest's listing that a workspace accepts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paracle_sandbox.results import FileInfo
from paracle_sandbox.service.users.kept_files import _marks


def entry(path: str) -> FileInfo:
    return {
        "name": "x", "path": path, "kind": "directory", "size": 0, "mode": 0o755, "modified": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        "", "/etc", "../x", "a/../../x", "a//b", "a/", "a/.", ".", "..", "a\0b", "a/\ud800",
        "\udfff\udc80", ".paracle-0123456789abcdef", "a/.paracle-0123456789abcdef/b",
    ],
)  # fmt: skip
async def test_a_path_that_is_none_is_not_kept(path: str) -> None:
    assert await _marks([entry(path)]) == {}


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "a/b",
        ".a/..b",
        "a.",
        "é",
        os.fsdecode(b"\xff/\xc3"),
        ".paracle-0",
        "x.paracle-0123456789abcdef",
    ],
)
async def test_a_path_of_any_bytes_is_kept(path: str, tmp_path: Path) -> None:
    assert list(await _marks([entry(path)])) == [path]
    (tmp_path / path).mkdir(parents=True)
