"""Copy trees and files between the host's disk and a sandbox: the host's side of it.

The format, the walk and the extractor are the guest's own (`guest.files.archive`), used here with
the host's rules. Every byte that comes from a sandbox is hostile: only new regular files and
directories are made, below one descriptor, in a hidden directory of ours; within limits; and
what was at the destination stays untouched until the whole of it has arrived.

``pack``, ``Unpacker`` and ``FileSink`` block on the disk, so an event loop calls them in threads,
in pieces.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..channel.frames import CHUNK, DATA
from ..channel.stream import Stream
from ..errors import SandboxFileError, SandboxFileNotFoundError, SandboxPathError
from ..guest.files.archive import CREATE, TreeError, TreePathError, temporary_name, write_all
from ..guest.files.archive import pack as pack_walk
from ..guest.files.dirwalk import Walk
from ..guest.files.staging import Staging
from ..host.platforms import has_directory_descriptors, open_flags
from .command_options import AnyPath

# Disk work is done in threads, in pieces large enough to pay for the way there.
_PIECE = 1 << 20
# What a file from a sandbox may be: never setuid, setgid, sticky or writable by others.
MODE_MASK = 0o755
# macOS has no O_PATH, and a directory that may be read does as well.
_DIRECTORY = os.O_RDONLY | open_flags("O_PATH", "O_DIRECTORY", "O_CLOEXEC")


T = TypeVar("T")


class Sink(Protocol):
    """Takes what arrives from a sandbox, in pieces."""

    def feed(self, data: bytes) -> None: ...
    def abort(self) -> None: ...


@contextmanager
def _translating_errors(action: str, path: Path) -> Iterator[None]:
    """Translate lower-layer errors to ours, which name what was being done to which path."""
    if not has_directory_descriptors():
        raise SandboxFileError(
            f"Cannot {action} {path}: this system holds no directory open, so a link could lead "
            "the copy elsewhere. Use read_bytes() and write_file()."
        )
    try:
        yield
    except TreePathError as error:
        raise SandboxPathError(f"Cannot {action} {path}: {error}") from error
    except TreeError as error:
        raise SandboxFileError(f"Cannot {action} {path}: {error}") from error
    except SandboxFileError:
        raise  # some of ours are OSErrors too
    except OSError as error:
        raise SandboxFileError(f"Cannot {action} {path}: {error.strerror}") from error


def pack(path: Path) -> Generator[bytes, None, None]:
    """Yield the tree stream of what is in a local directory.

    Empty directories and links (as links) are in it; sockets, devices and fifos are left out.
    Raises SandboxFileError when something cannot be read.
    """
    with _translating_errors("copy", path):
        try:
            top = os.open(path, _DIRECTORY)
        except FileNotFoundError as error:
            raise SandboxFileNotFoundError(f"File not found: {path}") from error
        try:
            walk = Walk(top, strict=True)
        finally:
            os.close(top)
        try:
            yield from filter(None, pack_walk(walk, links=True))
        finally:
            walk.close()


class Unpacker:
    """Writes a tree stream from a sandbox to a directory on the host.

    A destination that does not exist appears at `finish`, whole. One that is a directory gets
    the content then, file by file: each file is the old or the new one, and others stay.
    """

    def __init__(
        self, destination: Path, *, max_bytes: int, max_entries: int, draft: bytes | None = None
    ) -> None:
        self._destination = destination
        self._draft = draft
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._staging: Staging | None = None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. After an error nothing is left, and the rest is to be dropped."""
        with self._discarding_on_error() as staging:
            staging.writer.feed(data)

    def finish(self) -> int:
        """Puts the tree in its place and returns the number of entries."""
        with self._discarding_on_error() as staging:
            for _ in staging.settle():
                pass
            return staging.writer.entries

    def abort(self) -> None:
        """Removes what has arrived so far. May be called at any time, also after `finish`."""
        if self._staging is not None:
            self._staging.discard()

    @contextmanager
    def _discarding_on_error(self) -> Iterator[Staging]:
        with _translating_errors("copy to", self._destination):
            if self._staging is None:
                self._staging = self._open()
            try:
                yield self._staging
            except (OSError, TreeError):
                self._staging.discard()
                raise

    def _open(self) -> Staging:
        parent, name = _open_parent(self._destination)
        return Staging(
            parent,
            name,
            draft=self._draft,
            links=False,
            mode_mask=MODE_MASK,
            max_bytes=self._max_bytes,
            max_entries=self._max_entries,
        )


class FileSink:
    """Writes one file from a sandbox to the host's disk, beside its destination until whole.

    A link at the destination is replaced, not followed; a directory there is an error.
    """

    def __init__(self, destination: Path, max_bytes: int, draft: bytes | None = None) -> None:
        self._destination = destination
        self._left = max_bytes
        self._parent = -1
        self._fd = -1
        self._name = b""
        self._temporary = draft or temporary_name()
        self._size = 0
        self._over = False

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. After an error nothing is left, and the rest is to be dropped."""
        with self._discarding_on_error():
            self._left -= len(data)
            if self._left < 0:
                raise TreeError("the file is larger than allowed")
            write_all(self._fd, data)
            self._size += len(data)

    def finish(self, mode: int = 0o644) -> int:
        """Puts the file in its place and returns its size."""
        with self._discarding_on_error():
            os.fchmod(self._fd, mode & MODE_MASK)
            os.rename(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            self._close()
            return self._size

    def abort(self) -> None:
        """Removes what has arrived so far. May be called at any time, also after `finish`."""
        if self._fd >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._parent)
        self._close()

    @contextmanager
    def _discarding_on_error(self) -> Iterator[None]:
        with _translating_errors("copy to", self._destination):
            try:
                if self._over:
                    raise TreeError("it has already been ended")
                if self._fd < 0:
                    self._open()
                yield
            except (OSError, TreeError):
                self.abort()
                raise

    def _open(self) -> None:
        self._parent, self._name = _open_parent(self._destination)
        self._fd = os.open(self._temporary, CREATE, 0o600, dir_fd=self._parent)

    def _close(self) -> None:
        self._over = True
        for fd in (self._fd, self._parent):
            if fd >= 0:
                os.close(fd)
        self._fd = self._parent = -1


def _open_parent(destination: Path) -> tuple[int, bytes]:
    """Open the directory of a destination, made if missing; return it and the name in it."""
    name = destination.name
    if name in ("", ".."):
        # "." and "/" have no name of their own; they are directories and exist.
        return os.open(destination, _DIRECTORY), b"."
    destination.parent.mkdir(parents=True, exist_ok=True)
    return os.open(destination.parent, _DIRECTORY), os.fsencode(name)


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run work in a thread; when cancelled, end only after the thread has."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.gather(thread, return_exceptions=True)
        raise


async def receive_into(stream: Stream, sink: Sink) -> None:
    held: list[bytes] = []
    size = 0
    async for kind, payload in stream:
        if kind != DATA:
            raise stream.refuse("file content that cannot be")
        held.append(payload)
        size += len(payload)
        if size >= _PIECE:
            await in_thread(_feed, sink, held)
            held, size = [], 0
    await in_thread(_feed, sink, held or [b""])


def _feed(sink: Sink, pieces: list[bytes]) -> None:
    for piece in pieces:
        sink.feed(piece)


def finish_file(sink: FileSink, result: dict[str, Any]) -> None:
    mode = result.get("mode")
    sink.finish(mode if isinstance(mode, int) else 0o644)


def host_path(path: AnyPath) -> Path:
    """Return a path of the host. An empty one, which would be the current directory, is refused."""
    if not os.fspath(path):
        raise SandboxPathError("The path on this machine is empty")
    return Path(path)


def resolve_destination(path: Path) -> Path:
    """Make a path absolute, whatever becomes of the current directory; a link at its end stays."""
    try:
        if path.name in ("", ".."):
            return Path(os.path.realpath(path))
        return Path(os.path.realpath(path.parent), path.name)
    except OSError as error:
        raise SandboxFileError(f"Cannot copy to {path}: {error.strerror}") from error


def open_file(path: Path) -> tuple[int, Generator[bytes, None, None]]:
    """Open a local file: return its mode, and its content piece by piece."""
    try:
        # A fifo would keep the thread that opens it until somebody writes, and so this process.
        file = open(path, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115
    except FileNotFoundError:
        raise SandboxFileNotFoundError(f"File not found: {path}") from None
    except OSError as error:
        raise SandboxFileError(f"Cannot copy {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SandboxFileError(f"Cannot copy {path}: not a regular file")

    def pieces() -> Generator[bytes, None, None]:
        with file:
            while piece := file.read(_PIECE):
                yield piece

    return os.fstat(file.fileno()).st_mode & 0o777, pieces()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def next_pieces(pieces: Iterator[bytes]) -> bytes:
    """Join the next megabyte or so; b"" at the end."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE - CHUNK:
            break
    return held[0] if len(held) == 1 else b"".join(held)
