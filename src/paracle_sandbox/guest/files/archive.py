"""The tree stream: a directory tree as one run of bytes.

Entries follow each other: kind, mode, length of the name, size; then the name (relative,
"/" between its parts), then the content. A directory comes before what is in it, and the END
entry comes last, so that a stream that was cut off is known to be.

Used on both ends. `TreeWriter` treats the stream as hostile on either: it makes new files and
directories (and links, where allowed) below one descriptor, and never opens what exists.
"""

import errno
import os
import stat
import struct
from typing import Iterator, List, Optional, Union

from ...channel.frames import CHUNK
from .dirwalk import MAX_DEPTH, MAX_NAME, Found, Walk
from .paths import DIRECTORY, open_flags

ENTRY = struct.Struct(">BHHQ")
END, FILE, FOLDER, LINK = range(4)

MAX_PART = 255
READ = os.O_RDONLY | open_flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | open_flags("O_NOFOLLOW", "O_CLOEXEC")


class TreeError(ValueError):
    """The stream is not a tree, or is more than is allowed."""


class TreePathError(TreeError):
    """The stream names a path that is not plainly below the top."""


def temporary_name() -> bytes:
    return b".paracle-" + os.urandom(8).hex().encode("ascii")


def write_all(fd: int, data: Union[bytes, memoryview]) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pack(walk: Walk, links: bool) -> Iterator[bytes]:
    """The stream of what the walk finds; an empty piece for each entry that is left out."""
    for found in walk:
        kind = found.status.st_mode
        if stat.S_ISDIR(kind):
            yield _entry(walk, FOLDER, found, 0)
        elif stat.S_ISREG(kind):
            yield from _pack_file(walk, found)
        elif stat.S_ISLNK(kind) and links:
            target = os.readlink(found.name, dir_fd=walk.position.fd)
            yield _entry(walk, LINK, found, len(target)) + target
        else:
            walk.skipped += 1
            yield b""
    yield ENTRY.pack(END, 0, 0, 0)


def _entry(walk: Walk, kind: int, found: Found, size: int) -> bytes:
    walk.packed += 1
    mode = stat.S_IMODE(found.status.st_mode)
    return ENTRY.pack(kind, mode, len(found.path), size) + found.path


def _pack_file(walk: Walk, found: Found) -> Iterator[bytes]:
    try:
        fd = os.open(found.name, READ, dir_fd=walk.position.fd)
    except OSError as error:
        walk.skip(error)
        yield b""
        return
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ESTALE, "the file was replaced")
        data = os.read(fd, CHUNK)
        # What fits in one read has the size that was read, however the file changes.
        size = len(data) if len(data) < CHUNK else max(status.st_size, len(data))
        yield _entry(walk, FILE, found, size) + data
        yield from _rest(fd, size - len(data))
    finally:
        os.close(fd)


def _rest(fd: int, left: int) -> Iterator[bytes]:
    while left:
        data = os.read(fd, min(left, CHUNK))
        if not data:
            raise OSError(errno.ESTALE, "the file was cut while it was read")
        left -= len(data)
        yield data


class TreeWriter:
    """Makes the tree of a stream in a new, empty directory, given as a descriptor.

    Files are made with O_EXCL and must not exist, so a name that comes twice is refused; a
    directory must have come before what is in it.
    """

    def __init__(
        self,
        top: int,
        *,
        links: bool,
        mode_mask: int,
        max_bytes: Optional[int] = None,
        max_entries: Optional[int] = None,
    ) -> None:
        self.entries = 0
        self.finished = False
        self._top = top
        self._links = links
        self._mode_mask = mode_mask
        self._bytes_left = max_bytes
        self._max_entries = max_entries
        self._head = bytearray()
        self._need = ENTRY.size
        self._content_left = 0
        self._mode = 0
        self._name = b""
        self._file = -1
        self._target: Optional[bytearray] = None  # of the link whose content is arriving
        self._parent = -1
        self._parent_path: Optional[bytes] = None

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. TreeError or OSError; then only close() may follow."""
        view = memoryview(data)
        while view:
            if self.finished:
                raise TreeError("bytes after the end of the tree")
            if self._content_left:
                part = view[: self._content_left]
                self._content(part)
            else:
                part = view[: self._need - len(self._head)]
                self._heading(part)
            view = view[len(part) :]

    def finish(self) -> int:
        """The number of entries. TreeError when the end has not come."""
        self.close()
        if not self.finished:
            raise TreeError("the tree is cut off")
        return self.entries

    def close(self) -> None:
        for fd in (self._file, self._parent):
            if fd >= 0:
                os.close(fd)
        self._file = self._parent = -1
        self._parent_path = None

    def _heading(self, part: memoryview) -> None:
        self._head += part
        if len(self._head) < self._need:
            return
        kind, mode, length, size = ENTRY.unpack_from(self._head)
        if self._need == ENTRY.size and length:
            if length > MAX_NAME:
                raise TreePathError("a name of %d bytes is too long" % length)
            self._need += length
            return
        path = bytes(self._head[ENTRY.size :])
        self._head.clear()
        self._need = ENTRY.size
        self._begin(kind, mode, path, size)

    def _begin(self, kind: int, mode: int, path: bytes, size: int) -> None:
        if kind == END:
            if mode or path or size:
                raise TreeError("the end of the tree is malformed")
            self.finished = True
            return
        self._count(size)
        parts = check_path(path)
        self._name = parts.pop()
        self._mode = mode & self._mode_mask
        self._open_parent(parts)
        if kind == FILE:
            self._file = os.open(self._name, CREATE, 0o600, dir_fd=self._parent)
        elif kind == FOLDER and not size:
            os.mkdir(self._name, self._mode | 0o700, dir_fd=self._parent)
        elif kind == LINK and self._links and 0 < size <= MAX_NAME:
            self._target = bytearray()
        else:
            raise TreeError("an entry of kind %d and size %d is not allowed" % (kind, size))
        self._content_left = size
        if not size:
            self._complete()

    def _count(self, size: int) -> None:
        self.entries += 1
        if self._max_entries is not None and self.entries > self._max_entries:
            raise TreeError("more than %d entries" % self._max_entries)
        if self._bytes_left is not None:
            self._bytes_left -= size
            if self._bytes_left < 0:
                raise TreeError("the tree is larger than allowed")

    def _open_parent(self, parts: List[bytes]) -> None:
        path = b"/".join(parts)
        if path == self._parent_path:
            return
        fd = os.open(b".", DIRECTORY, dir_fd=self._top)
        for part in parts:
            outer = fd
            try:
                fd = os.open(part, DIRECTORY, dir_fd=outer)
            except OSError as error:
                raise TreePathError("%r is not in a directory of the tree" % path) from error
            finally:
                os.close(outer)
        if self._parent >= 0:
            os.close(self._parent)
        self._parent = fd
        self._parent_path = path

    def _content(self, part: memoryview) -> None:
        if self._target is not None:
            self._target += part
        else:
            write_all(self._file, part)
        self._content_left -= len(part)
        if not self._content_left:
            self._complete()

    def _complete(self) -> None:
        if self._target is not None:
            target, self._target = bytes(self._target), None
            if b"\0" in target:
                raise TreePathError("the target of a link holds a NUL")
            os.symlink(target, self._name, dir_fd=self._parent)
        elif self._file >= 0:
            os.fchmod(self._file, self._mode)
            os.close(self._file)
            self._file = -1


def check_path(path: bytes) -> List[bytes]:
    """The parts of a relative path, or TreePathError if it is anything but plain."""
    parts = path.split(b"/")
    for part in parts:
        if part in (b"", b".", b"..") or b"\0" in part or len(part) > MAX_PART:
            raise TreePathError("%r is not a plain relative path" % path[:200])
    if len(parts) > MAX_DEPTH + 1:
        raise TreePathError("nested deeper than %d directories" % MAX_DEPTH)
    return parts
