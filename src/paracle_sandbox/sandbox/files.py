"""The files of a sandbox: everything is done inside by the guest, the host opens nothing there."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from ..channel.frames import DATA, EVENT
from ..channel.stream import Stream
from ..errors import (
    SandboxFileDecodeError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxPathError,
)
from ..results import FileInfo
from .command import Command
from .host_copy import (
    FileSink,
    Sink,
    Unpacker,
    finish_file,
    host_path,
    in_thread,
    next_pieces,
    open_file,
    pack,
    receive_into,
    resolve_destination,
)
from .life import SandboxLife
from .outcome import MIB
from .paths import AnyPath, path_text

# What untrusted content may take of the host's memory and disk, unless the caller says more.
MAX_ENTRIES = 100_000
MAX_READ = 256 * MIB
MAX_LISTING = 64 * MIB
# Sizes and times of files are 64 bits, and a program may set them to anything.
_HUGE = float(1 << 64)
_KINDS = {"file": "file", "directory": "directory", "symlink": "link", "link": "link"}


Request = dict[str, Any]


@dataclass(frozen=True)
class Changes:
    """``is_all``: the entries are all that there is, and ``gone`` says nothing."""

    entries: list[FileInfo]
    gone: list[str]
    token: str
    is_all: bool


class SandboxFiles(SandboxLife):
    """Paths are relative to the working directory, or absolute below what is the sandbox's own:
    the working directory, /tmp, its volumes, and with ``read_only_filesystem=False`` /home, /opt,
    /srv and /mnt. Others raise SandboxPathError. A missing file raises SandboxFileNotFoundError,
    a full disk ResourceLimitError, anything else that goes wrong SandboxFileError."""

    @overload
    async def read_file(
        self,
        path: AnyPath,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        max_bytes: int = MAX_READ,
    ) -> str: ...
    @overload
    async def read_file(
        self, path: AnyPath, *, encoding: None, max_bytes: int = MAX_READ
    ) -> bytes: ...
    async def read_file(
        self,
        path: AnyPath,
        *,
        encoding: str | None = "utf-8",
        errors: str = "strict",
        max_bytes: int = MAX_READ,
    ) -> str | bytes:
        """The content as text; the exact bytes without encoding. Raises SandboxFileDecodeError
        when it is no text in that encoding, unless ``errors`` says what to do with the rest, as
        for bytes.decode."""
        content = await self.read_bytes(path, max_bytes=max_bytes)
        if encoding is None:
            return content
        try:
            return content.decode(encoding, errors)
        except UnicodeDecodeError as error:
            raise SandboxFileDecodeError(
                f"{path} is not {encoding} text (byte {error.start}: {error.reason}): use "
                'read_bytes, or read_file(path, errors="replace")',
                self.sandbox_id, filename=os.fspath(path), encoding=error.encoding,
                start=error.start, end=error.end, reason=error.reason,
            ) from None  # fmt: skip

    async def read_bytes(self, path: AnyPath, *, max_bytes: int = MAX_READ) -> bytes:
        """The content, which must fit into memory: use copy_from for what is larger."""
        content = bytearray()
        # The guest refuses what is too large before it reads any of it; we count all the same.
        request = self._asking("read", path, max_bytes=max_bytes)
        async with self._operation() as connection:
            with connection.open(request) as stream:
                async for kind, payload in stream:
                    if kind != DATA:
                        raise stream.refuse("file content that cannot be")
                    content += payload
                    if len(content) > max_bytes:
                        raise _too_large(path, max_bytes, self.sandbox_id)
        return bytes(content)

    async def write_file(self, path: AnyPath, content: str | bytes) -> None:
        """Replace the content of the file, or make it with its parents: whole, or not at all.

        A link is followed, as a program would. Raises SandboxPermissionError for a file that the
        sandbox's user may not write."""
        await self._write(self._asking("write", path), _raw(content))

    async def _write(self, request: Request, content: bytes) -> None:
        async with self._operation() as connection:
            with connection.open(request) as stream:
                if await stream.write(content):
                    stream.end()
                await stream.finish()

    async def list_files(self, path: AnyPath = ".", recursive: bool = False) -> list[FileInfo]:
        """What is in a directory, and below it with ``recursive``, in no particular order."""
        request = self._asking("list", path, recursive=recursive)
        async with self._operation() as connection:
            return await self._entries(connection.open(request), path)

    async def listed_after(self, command: Command) -> list[FileInfo]:
        """What was in the working directory, and below it, when a command that was started with
        ``then_listed`` had ended. Can be asked for once."""
        stream, command.listing = command.listing, None
        if stream is None:
            raise SandboxFileError("No listing was asked for, or it was read", self.sandbox_id)
        async with self._operation():
            return await self._entries(stream, ".")

    async def list_changes(self, since: str = "", after: Command | None = None) -> Changes:
        """What is new, changed or gone below the working directory since the listing that gave
        the token ``since``, or all of it: links and special files left out. ``after`` is a
        command that was started with that token as ``then_listed``: as it was when it ended."""
        async with self._operation() as connection:
            if after is not None and after.listing is not None:
                stream, after.listing = after.listing, None
            else:
                stream = connection.open(changes_request(since))
            return await _changes(stream, self.sandbox_id)

    async def _entries(self, listing: Stream, path: AnyPath) -> list[FileInfo]:
        entries: list[FileInfo] = []
        room = MAX_LISTING
        with listing as stream:
            async for kind, payload in stream:
                batch = stream.event(payload).get("entries") if kind == EVENT else None
                if not isinstance(batch, list):
                    raise stream.refuse("a listing that is none")
                await asyncio.sleep(0)  # many parts may wait already: others have their turn
                entries += [_file_info(stream, entry) for entry in batch]
                room -= len(payload)
                if len(entries) > MAX_ENTRIES or room < 0:
                    raise SandboxFileError(
                        f"{path} holds too many files to list at once", self.sandbox_id
                    )
        return entries

    async def stat(self, path: AnyPath) -> FileInfo:
        """Follows links."""
        request = self._asking("stat", path)
        async with self._operation() as connection:
            with connection.open(request) as stream:
                return _file_info(stream, await stream.finish())

    async def realpath(self, path: AnyPath) -> str:
        """The absolute path without links and dots; its last name need not be there."""
        async with self._operation() as connection:
            with connection.open(self._asking("realpath", path)) as stream:
                found = (await stream.finish()).get("path")
                if not isinstance(found, str) or not found.startswith("/"):
                    raise stream.refuse("a path that is none")
                return found

    async def exists(self, path: AnyPath) -> bool:
        try:
            await self.stat(path)
        except SandboxFileNotFoundError:
            return False
        return True

    async def mkdir(self, path: AnyPath, parents: bool = True) -> None:
        """Make a directory; with ``parents`` the missing ones above it, and it may exist."""
        await self._call(self._asking("mkdir", path, parents=parents))

    async def move(self, source: AnyPath, target: AnyPath) -> None:
        request = {"op": "move", "source": self._checked(source), "target": self._checked(target)}
        await self._call({**request, "places": list(self._places)})

    async def remove(self, path: AnyPath, recursive: bool = False) -> None:
        """Remove a file or an empty directory; any directory with ``recursive``."""
        await self._call(self._asking("remove", path, recursive=recursive))

    def _asking(self, op: str, path: AnyPath, **more: Any) -> Request:
        """A request of the guest about one path, which it may not leave the places with."""
        return {"op": op, "path": self._checked(path), "places": list(self._places), **more}

    async def _call(self, request: Request) -> None:
        async with self._operation() as connection:
            await connection.call(request)

    # Copies

    async def copy_to(self, source: AnyPath, path: AnyPath) -> None:
        """Copy a file or directory of the host into the sandbox, as ``path``; into ``path``
        under its own name when that ends in a slash, and a file also when it is a directory."""
        local, target = host_path(source), path_text(path, self.sandbox_id)
        if target.endswith("/"):
            target = posixpath.join(target, local.name)
        target = self._checked(target)
        if await asyncio.to_thread(local.is_dir):
            await self._send(self._asking("put_tree", target), pack(local))
            return
        try:
            await self._send_file(local, target)
        except SandboxFileError as error:
            if isinstance(error, SandboxPathError) or not await self._is_directory(target):
                raise
            await self._send_file(local, posixpath.join(target, local.name))

    async def _send_file(self, local: Path, target: str) -> None:
        mode, pieces = await asyncio.to_thread(open_file, local)
        await self._send(self._asking("write", target, mode=mode), pieces)

    async def _send(self, request: Request, pieces: Generator[bytes, None, None]) -> None:
        with closing(pieces):
            async with self._operation() as connection:
                with connection.open(request) as stream:
                    while piece := await in_thread(next_pieces, pieces):
                        if not await stream.write(piece):
                            break
                    stream.end()
                    await stream.finish()

    async def _is_directory(self, path: str) -> bool:
        try:
            return (await self.stat(path))["kind"] == "directory"
        except SandboxFileError:
            return False

    async def copy_from(
        self,
        path: AnyPath,
        destination: AnyPath,
        *,
        max_bytes: int | None = None,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        """Copy a file or directory of the sandbox to the host: whole, or not at all.

        Links and special files are left out. Raises SandboxFileError when it is larger than
        ``max_bytes`` (twice the disk limit if not given) or has more than ``max_entries``.
        """
        path = self._checked(path)
        limit = self.config.disk_mb * 2 * MIB if max_bytes is None else max_bytes
        target = resolve_destination(host_path(destination))
        found = await self.stat(path)
        if found["kind"] == "directory":
            with self._backend.drafts.noted(target, target.parent) as draft:
                tree = Unpacker(target, max_bytes=limit, max_entries=max_entries, draft=draft)
                request = self._asking("get_tree", path, max_bytes=limit, max_entries=max_entries)
                await self._fetch(request, tree, lambda _: tree.finish())
        elif found["size"] > limit:  # a hole costs the program nothing, and us all of it
            raise _too_large(path, limit, self.sandbox_id)
        else:
            if await asyncio.to_thread(target.is_dir):
                target /= posixpath.basename(path)
            with self._backend.drafts.noted(target.parent) as draft:
                sink = FileSink(target, limit, draft)
                await self._fetch(self._asking("read", path), sink, lambda r: finish_file(sink, r))

    async def _fetch(
        self, request: Request, sink: Sink, finish: Callable[[dict[str, Any]], object]
    ) -> None:
        async with self._operation() as connection:
            try:
                with connection.open(request) as stream:
                    await receive_into(stream, sink)
                    await in_thread(finish, stream.result)
            finally:
                await in_thread(sink.abort)


def changes_request(since: str) -> Request:
    return {"op": "changes", "path": ".", "since": since or None, "most": MAX_ENTRIES}


async def _changes(listing: Stream, sandbox_id: str) -> Changes:
    entries: list[FileInfo] = []
    gone: list[str] = []
    room = MAX_LISTING
    with listing as stream:
        async for kind, payload in stream:
            event = stream.event(payload) if kind == EVENT else {}
            batch, paths = event.get("entries", []), event.get("gone", [])
            if kind != EVENT or not isinstance(batch, list) or not isinstance(paths, list):
                raise stream.refuse("a listing that is none")
            if not all(isinstance(path, str) for path in paths):
                raise stream.refuse("a path that is none")
            await asyncio.sleep(0)  # many parts may wait already: others have their turn
            entries += [_file_info(stream, entry) for entry in batch]
            gone += paths
            room -= len(payload)
            if len(entries) + len(gone) > 2 * MAX_ENTRIES or room < 0:
                raise SandboxFileError("There are too many files to list", sandbox_id)
        token = stream.result.get("token")
        if not isinstance(token, str) or len(token) > 100:
            raise stream.refuse("a listing without its token")
        return Changes(entries, gone, token, stream.result.get("all") is not False)


def _too_large(path: AnyPath, max_bytes: int, sandbox_id: str) -> SandboxFileError:
    return SandboxFileError(
        f"{path} is larger than {max_bytes} bytes: ask for more with max_bytes, or use copy_from",
        sandbox_id, errno=errno.EFBIG, filename=os.fspath(path),
    )  # fmt: skip


def _raw(content: str | bytes) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if not isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(f"content must be a str or bytes, not {type(content).__name__}")
    return bytes(content)


def _file_info(stream: Stream, entry: object) -> FileInfo:
    """An entry as the guest describes it, which may be anything."""
    if not isinstance(entry, dict):
        raise stream.refuse("a file entry that is none")
    texts = [entry.get("name"), entry.get("path"), entry.get("kind")]
    numbers = [entry.get("size"), entry.get("mode"), entry.get("modified")]
    if not all(isinstance(value, str) for value in texts):
        raise stream.refuse("a file entry without its names")
    # JSON here may hold infinities and numbers that no float can.
    if not all(isinstance(value, int | float) and abs(value) < _HUGE for value in numbers):
        raise stream.refuse("a file entry without its numbers")
    return {
        "name": entry["name"],
        "path": entry["path"],
        "kind": _KINDS.get(entry["kind"], "other"),
        "size": int(entry["size"]),
        "mode": int(entry["mode"]),
        "modified": float(entry["modified"]),
    }
