"""Read, write, list and copy the files of a sandbox: the guest does it, the host opens nothing
there."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

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
from .command_options import AnyPath
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
from .life import Life
from .outcome import MIB

if TYPE_CHECKING:
    from ..config import SandboxConfig

# What untrusted content may take of the host's memory and disk, unless the caller says more.
MAX_ENTRIES = 100_000
MAX_READ = 256 * MIB
MAX_LISTING = 64 * MIB
# Sizes and times of files are 64 bits, and a program may set them to anything.
_HUGE = float(1 << 64)
_KINDS = {"file": "file", "directory": "directory", "symlink": "link", "link": "link"}


# What ``read_only_filesystem=False`` makes writable, on every backend.
EXTRA_WRITABLE = ("/home", "/opt", "/srv", "/mnt")

Request = dict[str, Any]


@dataclass(frozen=True)
class Changes:
    """``is_all``: the entries are all that there is, and ``gone`` says nothing."""

    entries: list[FileInfo]
    gone: list[str]
    token: str
    is_all: bool


class Files:
    """The part of a sandbox that moves files. Its public methods are described at Sandbox."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.places = own_places(life.config)

    def checked(self, path: AnyPath) -> str:
        """Return the path as text. Raises SandboxPathError, and puts that on record, when it leads
        out of the sandbox's own directories."""
        text = path_text(path, self._life.sandbox_id)
        try:
            return checked_path(text, self.places, self._life.sandbox_id)
        except SandboxPathError:
            self._life.record_escape(text)
            raise

    async def read_file(
        self,
        path: AnyPath,
        *,
        encoding: str | None = "utf-8",
        errors: str = "strict",
        max_bytes: int = MAX_READ,
    ) -> str | bytes:
        content = await self.read_bytes(path, max_bytes=max_bytes)
        if encoding is None:
            return content
        try:
            return content.decode(encoding, errors)
        except UnicodeDecodeError as error:
            raise SandboxFileDecodeError(
                f"{path} is not {encoding} text (byte {error.start}: {error.reason}): use "
                'read_bytes, or read_file(path, errors="replace")',
                self._life.sandbox_id, filename=os.fspath(path), encoding=error.encoding,
                start=error.start, end=error.end, reason=error.reason,
            ) from None  # fmt: skip

    async def read_bytes(self, path: AnyPath, *, max_bytes: int = MAX_READ) -> bytes:
        content = bytearray()
        # The guest refuses what is too large before it reads any of it; we count all the same.
        request = self.request("read", path, max_bytes=max_bytes)
        async with self._life.operation() as connection:
            with connection.open(request) as stream:
                async for kind, payload in stream:
                    if kind != DATA:
                        raise stream.refuse("file content that cannot be")
                    content += payload
                    if len(content) > max_bytes:
                        raise _too_large(path, max_bytes, self._life.sandbox_id)
        return bytes(content)

    async def write_file(self, path: AnyPath, content: str | bytes) -> None:
        await self.write(self.request("write", path), _raw(content))

    async def write(self, request: Request, content: bytes) -> None:
        async with self._life.operation() as connection:
            with connection.open(request) as stream:
                if await stream.write(content):
                    stream.end()
                await stream.finish()

    async def read_stream(
        self, path: AnyPath, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        request = self.request("read", path, offset=offset)
        if length is not None:
            request["length"] = length
        connection = self._life.live()
        self._life.touch(+1)
        try:
            with connection.open(request) as stream:
                while piece := await self._next_piece(stream):
                    yield piece
        finally:
            self._life.touch(-1)

    async def _next_piece(self, stream: Stream) -> bytes:
        """Return the next piece, b"" at the end. Each has its own deadline: one around them all
        would count the time that the reader takes, and end what the reader is doing then."""
        async with self._life.operation():
            async for kind, payload in stream:
                if kind != DATA:
                    raise stream.refuse("file content that cannot be")
                return payload
        return b""

    async def write_stream(
        self, path: AnyPath, pieces: AsyncIterable[bytes], *, max_bytes: int | None = None
    ) -> int:
        size = 0
        request = self.request("write", path)
        async with self._life.operation() as connection:
            with connection.open(request) as stream:
                async for piece in pieces:
                    size += len(piece)
                    if max_bytes is not None and size > max_bytes:
                        raise SandboxFileError(
                            f"{path} is larger than {max_bytes} bytes", self._life.sandbox_id
                        )
                    if not await stream.write(piece):
                        break
                stream.end()
                await stream.finish()
        return size

    async def list_files(self, path: AnyPath = ".", recursive: bool = False) -> list[FileInfo]:
        request = self.request("list", path, recursive=recursive)
        async with self._life.operation() as connection:
            return await self._entries(connection.open(request), path)

    async def listed_after(self, command: Command) -> list[FileInfo]:
        stream, command.listing = command.listing, None
        if stream is None:
            raise SandboxFileError(
                "No listing was asked for, or it was read", self._life.sandbox_id
            )
        async with self._life.operation():
            return await self._entries(stream, ".")

    async def list_changes(self, since: str = "", after: Command | None = None) -> Changes:
        async with self._life.operation() as connection:
            if after is not None and after.listing is not None:
                stream, after.listing = after.listing, None
            else:
                stream = connection.open(changes_request(since))
            return await _changes(stream, self._life.sandbox_id)

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
                        f"{path} holds too many files to list at once", self._life.sandbox_id
                    )
        return entries

    async def stat(self, path: AnyPath) -> FileInfo:
        request = self.request("stat", path)
        async with self._life.operation() as connection:
            with connection.open(request) as stream:
                return _file_info(stream, await stream.finish())

    async def realpath(self, path: AnyPath) -> str:
        async with self._life.operation() as connection:
            with connection.open(self.request("realpath", path)) as stream:
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
        await self._call(self.request("mkdir", path, parents=parents))

    async def move(self, source: AnyPath, target: AnyPath) -> None:
        request = {"op": "move", "source": self.checked(source), "target": self.checked(target)}
        await self._call({**request, "places": list(self.places)})

    async def remove(self, path: AnyPath, recursive: bool = False) -> None:
        await self._call(self.request("remove", path, recursive=recursive))

    def request(self, op: str, path: AnyPath, **more: Any) -> Request:
        """Build a request to the guest about one path, which must not lead out of the places."""
        return {"op": op, "path": self.checked(path), "places": list(self.places), **more}

    async def _call(self, request: Request) -> None:
        async with self._life.operation() as connection:
            await connection.call(request)

    # Copies

    async def copy_to(self, source: AnyPath, path: AnyPath) -> None:
        local, target = host_path(source), path_text(path, self._life.sandbox_id)
        if target.endswith("/"):
            target = posixpath.join(target, local.name)
        target = self.checked(target)
        if await asyncio.to_thread(local.is_dir):
            await self._send(self.request("put_tree", target), pack(local))
            return
        try:
            await self._send_file(local, target)
        except SandboxFileError as error:
            if isinstance(error, SandboxPathError) or not await self._is_directory(target):
                raise
            await self._send_file(local, posixpath.join(target, local.name))

    async def _send_file(self, local: Path, target: str) -> None:
        mode, pieces = await asyncio.to_thread(open_file, local)
        await self._send(self.request("write", target, mode=mode), pieces)

    async def _send(self, request: Request, pieces: Generator[bytes, None, None]) -> None:
        with closing(pieces):
            async with self._life.operation() as connection:
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
        path = self.checked(path)
        limit = self._life.config.disk_mb * 2 * MIB if max_bytes is None else max_bytes
        target = resolve_destination(host_path(destination))
        found = await self.stat(path)
        if found["kind"] == "directory":
            with self._life.backend.drafts.noting(target, target.parent) as draft:
                tree = Unpacker(target, max_bytes=limit, max_entries=max_entries, draft=draft)
                request = self.request("get_tree", path, max_bytes=limit, max_entries=max_entries)
                await self._fetch(request, tree, lambda _: tree.finish())
        elif found["size"] > limit:  # a hole costs the program nothing, and us all of it
            raise _too_large(path, limit, self._life.sandbox_id)
        else:
            if await asyncio.to_thread(target.is_dir):
                target /= posixpath.basename(path)
            with self._life.backend.drafts.noting(target.parent) as draft:
                sink = FileSink(target, limit, draft)
                await self._fetch(self.request("read", path), sink, lambda r: finish_file(sink, r))

    async def _fetch(
        self, request: Request, sink: Sink, finish: Callable[[dict[str, Any]], object]
    ) -> None:
        async with self._life.operation() as connection:
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
    """Check an entry as the guest describes it, which may be anything."""
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


# Paths, as far as their text can be judged on the host. The guest judges again, with the links that
# only it can see.


def path_text(path: AnyPath, sandbox_id: str) -> str:
    """Return the path as text. Raises TypeError for what is none, SandboxPathError for an empty
    one."""
    # A path of Windows has the steps that are meant, but not the slashes.
    text = path.as_posix() if isinstance(path, PurePath) else os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be a str or a Path, not {type(path).__name__}")
    if not text:
        raise SandboxPathError("The path is empty", sandbox_id)
    return text


def own_places(config: SandboxConfig) -> tuple[str, ...]:
    """Return the directories that file operations may touch: those that are the sandbox's own, or
    were given to it. The working directory is the first."""
    volumes = (target.removesuffix(":rw").removesuffix(":ro") for target in config.volumes.values())
    writable = () if config.read_only_filesystem else EXTRA_WRITABLE
    return tuple(dict.fromkeys((config.working_dir, "/tmp", *volumes, *writable)))


def checked_path(path: str, places: Sequence[str], sandbox_id: str) -> str:
    """Return the path, unchanged. Raises SandboxPathError when it is none, or leaves the places: a
    relative one the first of them, the working directory."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise SandboxPathError(f"Not a path: {path!r}", sandbox_id, path=path)
    full = posixpath.normpath(posixpath.join(places[0], path))
    roots = places if path.startswith("/") else places[:1]
    if not any(full == root or full.startswith(root + "/") for root in roots):
        raise SandboxPathError(
            f"The path leaves the sandbox's own directories ({', '.join(places)}): {path!r}",
            sandbox_id, path=path,
        )  # fmt: skip
    return path
