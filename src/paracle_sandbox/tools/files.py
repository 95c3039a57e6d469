"""SandboxFilesTool makes, reads, changes, moves and removes files of a sandbox."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, ClassVar

from ..client import LocalSandboxClient
from ..errors import SandboxFileError
from ..sandbox.sandbox import Sandbox
from .arguments import ArgumentFault
from .result import MAX_TEXT, ToolResult, make_failure, shorten, to_observation
from .schema import boolean, number, schema, text
from .tool import SandboxTool

MAX_LISTED = 500
# A file is held in memory, split into lines, until its result is gone.
MAX_READ = 16 << 20
EXTRACT_SECONDS = 300.0
_EXTRACT = """
import gzip, os, shutil, sys, tarfile, zipfile
source, target = sys.argv[1:]
os.makedirs(target, exist_ok=True)
if zipfile.is_zipfile(source):
    with zipfile.ZipFile(source) as archive:
        archive.extractall(target)
        print(len(archive.namelist()), "entries")
elif tarfile.is_tarfile(source):
    with tarfile.open(source) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(target, **safely)
        print(len(archive.getnames()), "entries")
elif open(source, "rb").read(2) == b"\\x1f\\x8b":
    name = os.path.basename(source)
    name = name[:-3] if name.endswith(".gz") else name + ".out"
    with gzip.open(source) as packed, open(os.path.join(target, name), "wb") as file:
        shutil.copyfileobj(packed, file)
    print(name)
else:
    sys.exit("it is no zip, tar or gzip archive")
"""
_ACTIONS = ["create_file", "read_file", "str_replace", "full_file_rewrite", "delete_file",
            "list_files", "move_file", "make_directory", "extract_archive"]  # fmt: skip
_ACTION_ALIASES = {
    "create": "create_file", "write": "full_file_rewrite", "write_file": "full_file_rewrite",
    "rewrite": "full_file_rewrite", "read": "read_file", "view": "read_file", "cat": "read_file",
    "replace": "str_replace", "edit": "str_replace", "edit_file": "str_replace",
    "delete": "delete_file", "remove": "delete_file", "delete_directory": "delete_file",
    "remove_directory": "delete_file", "rmdir": "delete_file",
    "list": "list_files", "ls": "list_files",
    "move": "move_file", "rename": "move_file", "rename_file": "move_file",
    "mkdir": "make_directory", "create_directory": "make_directory", "unzip": "extract_archive",
    "extract": "extract_archive", "unpack": "extract_archive", "unzip_file": "extract_archive",
}  # fmt: skip


class SandboxFilesTool(SandboxTool):
    """Works on files. Paths are relative to the working directory."""

    name = "sandbox_files"
    description = (
        "Work on the files of the sandbox: create_file makes a new one, full_file_rewrite makes or "
        "replaces one, str_replace replaces one exact piece of text, read_file, delete_file, "
        "list_files, move_file, make_directory, extract_archive (zip, tar, gz)."
    )
    parameters = schema(
        ["action"],
        action=text("What to do.", enum=_ACTIONS),
        file_path=text("The file or directory, relative to the working directory."),
        file_contents=text("The whole text, for create_file and full_file_rewrite."),
        old_str=text("The exact text to replace; it must occur once."),
        new_str=text("The text to put in its place."),
        target_path=text("Where to move it, or the directory to extract it to."),
        permissions=text("Such as 644 or 755; left alone if left out."),
        recursive=boolean("List or delete everything below as well."),
        start_line=number("With read_file: the first line to read, counted from 1."),
        end_line=number("With read_file: the last line to read."),
    )
    aliases: ClassVar = {
        "path": "file_path", "filename": "file_path", "file": "file_path",
        "directory": "file_path", "dir": "file_path", "folder": "file_path",
        "name": "file_path", "source": "file_path",
        "content": "file_contents", "contents": "file_contents", "data": "file_contents",
        "text": "file_contents", "file_text": "file_contents", "old_string": "old_str",
        "old_text": "old_str", "old": "old_str", "new_string": "new_str", "new_text": "new_str",
        "new": "new_str", "target": "target_path",
        "destination": "target_path", "dest": "target_path", "new_path": "target_path",
        "archive": "file_path", "archive_path": "file_path",
        "start": "start_line", "offset": "start_line", "from_line": "start_line",
        "end": "end_line", "to_line": "end_line",
        "mode": "permissions", "command": "action", "operation": "action",
    }  # fmt: skip

    action_aliases = _ACTION_ALIASES

    def __init__(self, client: LocalSandboxClient | None = None) -> None:
        super().__init__(client)
        # One change at a time: of two changes of one file, neither may be lost.
        self._change_lock = asyncio.Lock()

    async def run(self, action: str, file_path: str = "", **rest: Any) -> ToolResult:
        sandbox = await self.sandbox()
        if action == "list_files":
            return await self._list(sandbox, file_path or ".", rest.get("recursive", False))
        if not file_path:
            raise ArgumentFault("The argument 'file_path' is missing.")
        async with self._change_lock:
            return await getattr(self, f"_{action}")(sandbox, file_path, **rest)  # type: ignore[no-any-return]

    async def execute(self, **arguments: Any) -> dict[str, Any]:
        """Do an action, for programs: returns ``observation``, ``success``, and ``content`` or
        ``files``. Raises SandboxError, and ValueError for arguments that cannot be used."""
        return to_observation(await self.run(**self.checked(arguments)))

    async def _create_file(self, sandbox: Sandbox, path: str, **rest: Any) -> ToolResult:
        if await sandbox.exists(path):
            raise ArgumentFault(f"{path} exists already: use full_file_rewrite or str_replace.")
        return await self._full_file_rewrite(sandbox, path, **rest)

    async def _full_file_rewrite(
        self,
        sandbox: Sandbox,
        path: str,
        file_contents: str | None = None,
        permissions: str | None = None,
        **rest: Any,
    ) -> ToolResult:
        if file_contents is None:
            raise ArgumentFault("The argument 'file_contents' is missing.")
        mode = None if permissions is None else _parse_mode(permissions)
        if mode is None and await sandbox.exists(path):
            mode = (await sandbox.stat(path))["mode"] & 0o777
        await sandbox.write_file(path, file_contents)
        if mode is not None:
            await _set_mode(sandbox, path, mode)
        return ToolResult(f"Written {len(file_contents.encode())} bytes to {path}.")

    async def _read_file(
        self,
        sandbox: Sandbox,
        path: str,
        start_line: float = 1,
        end_line: float | None = None,
        **rest: Any,
    ) -> ToolResult:
        content = await _read_text(sandbox, path)
        if start_line > 1 or end_line is not None:
            lines = content.splitlines(keepends=True)
            if start_line > len(lines):
                raise ArgumentFault(f"{path} has {len(lines)} lines.")
            last = len(lines) if end_line is None else int(end_line)
            content = "".join(lines[int(start_line) - 1 : last])
        shown = shorten(content)
        if shown != content:
            shown += "\n(Read parts of it with start_line and end_line.)"
        return ToolResult(shown or "(nothing is there)", data={"content": content})

    async def _str_replace(
        self,
        sandbox: Sandbox,
        path: str,
        old_str: str | None = None,
        new_str: str = "",
        **rest: Any,
    ) -> ToolResult:
        if not old_str:
            raise ArgumentFault("The argument 'old_str' is missing.")
        raw = await sandbox.read_bytes(path)
        found = raw.count(old_str.encode())
        if found != 1:
            problem = "does not occur" if not found else f"occurs {found} times"
            advice = "Read the file" if not found else "Take in more of the text around it"
            raise ArgumentFault(f"old_str {problem} in {path}. {advice}, and try again.")
        mode = (await sandbox.stat(path))["mode"] & 0o777
        await sandbox.write_file(path, raw.replace(old_str.encode(), new_str.encode()))
        await _set_mode(sandbox, path, mode)
        return ToolResult(f"Replaced in {path}.")

    async def _delete_file(
        self, sandbox: Sandbox, path: str, recursive: bool = False, **rest: Any
    ) -> ToolResult:
        await sandbox.remove(path, recursive=recursive)
        return ToolResult(f"Deleted {path}.")

    async def _move_file(
        self, sandbox: Sandbox, path: str, target_path: str = "", **rest: Any
    ) -> ToolResult:
        if not target_path:
            raise ArgumentFault("The argument 'target_path' is missing.")
        await sandbox.move(path, target_path)
        return ToolResult(f"Moved {path} to {target_path}.")

    async def _make_directory(self, sandbox: Sandbox, path: str, **rest: Any) -> ToolResult:
        await sandbox.mkdir(path)
        return ToolResult(f"Made {path}.")

    async def _extract_archive(
        self, sandbox: Sandbox, path: str, target_path: str = "", **rest: Any
    ) -> ToolResult:
        """Extract inside the sandbox, where a hostile archive can do no harm to the host."""
        await sandbox.stat(path)
        argv = ["python3", "-c", _EXTRACT, path, target_path or "."]
        done = await sandbox.execute(argv, EXTRACT_SECONDS)
        if done["exit_code"]:
            return make_failure(
                f"{path} was not extracted: {shorten(done['stderr'], 1000)}", **done
            )
        return ToolResult(f"Extracted {path} to {target_path or '.'}: {done['stdout'].strip()}.")

    async def _list(self, sandbox: Sandbox, path: str, recursive: bool) -> ToolResult:
        entries = sorted(await sandbox.list_files(path, recursive), key=lambda e: e["path"])
        names = [e["path"].removeprefix(f"{sandbox.config.working_dir}/") for e in entries]
        lines = [
            f"{name}/" if e["kind"] == "directory" else f"{name} ({e['size']} bytes)"
            for name, e in zip(names, entries, strict=True)
        ]
        shown = "\n".join(lines[:MAX_LISTED])
        if len(lines) > MAX_LISTED:
            shown += f"\n... and {len(lines) - MAX_LISTED} more"
        return ToolResult(shorten(shown, 2 * MAX_TEXT) or "(empty)", data={"files": names})


async def _read_text(sandbox: Sandbox, path: str) -> str:
    try:
        return await sandbox.read_file(path, max_bytes=MAX_READ)
    except SandboxFileError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ArgumentFault(
            f"{path} has more than {MAX_READ >> 20} MB: look at parts of it with head, tail or sed."
        ) from None


def _parse_mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise ArgumentFault(f"permissions must be such as 644 or 755, not {text!r}.")
    return mode


async def _set_mode(sandbox: Sandbox, path: str, mode: int) -> None:
    done = await sandbox.execute(["chmod", f"{mode:o}", "--", path])
    if done["exit_code"]:
        raise SandboxFileError(f"The permissions of {path} were not set", sandbox.sandbox_id)
