"""Reads the user's files without a sandbox. This is the only tool of an agent in ``safe`` mode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from ..tools import Tool, ToolResult
from ..tools.arguments import ArgumentFault
from ..tools.result import make_failure, shorten
from ..tools.schema import schema, text
from .workspace_sync import WorkspaceSync

MAX_READ = 1 << 20


class HostFilesTool(Tool):
    """Lists and reads the files that the user gave. It changes and runs nothing."""

    name = "read_files"
    description = "List the files that the user gave, or read one. Nothing can be run or changed."
    parameters = schema(
        ["action"],
        action=text("What to do.", enum=["list_files", "read_file"]),
        file_path=text("The file, as list_files names it."),
    )
    aliases: ClassVar = {"path": "file_path", "filename": "file_path"}

    def __init__(self, project: WorkspaceSync) -> None:
        self._files = project.sources

    async def run(self, action: str, file_path: str = "") -> ToolResult:
        if action == "list_files":
            return ToolResult("\n".join(sorted(self._files)) or "No files were given.")
        if file_path not in self._files:
            raise ArgumentFault(f"{file_path!r} was not given; list_files shows what was.")
        try:
            content = await asyncio.to_thread(_read_text, self._files[file_path])
        except OSError as error:
            return make_failure(f"{file_path} cannot be read: {error.strerror}")
        return ToolResult(shorten(content) or "(the file is empty)")


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_READ).decode("utf-8", "replace")


def describe_safe_mode(tools: Sequence[str]) -> str:
    """Return what is added to the instructions of an agent in safe mode."""
    wanted = ", ".join(tools)
    return (
        f"\n\nNo sandbox is available, so the tools {wanted} are not: you can read the files that "
        "the user gave, and nothing can be run. Say what you would do, with the code to do it."
    )
