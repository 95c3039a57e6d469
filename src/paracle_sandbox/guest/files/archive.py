"""The tree stream: a directory tree as one sequence of bytes.

Each entry consists of kind, mode, length of the name and size; then the name (relative, with "/"
between its parts); then the content. A directory comes before its entries. The END entry comes
last, which tells a whole stream from one that was cut off.

Both ends use this module. On both, `TreeWriter` treats the stream as hostile: it creates new files
and directories (and links, where allowed) below one descriptor, and never opens anything that
exists.
"""

import errno
import os
import stat
import struct
from typing import Iterator, List, Optional, Union

from ...channel.frames import CHUNK
from .dirwalk import MAX_DEPTH, MAX_NAME, Entry, Walk
from .paths import DIRECTORY, open_flags

ENTRY = struct.Struct(">BHHQ")
END, FILE, FOLDER, LINK = range(4)

MAX_PART = 255
READ = os.O_RDONLY | open_flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | open_flags("O_NOFOLLOW", "O_CLOEXEC")


class TreeError(ValueError):
    """The stream is not a tree stream, or is larger than allowed."""


class TreePathError(TreeError):
    """The stream names a path that may lead out of the tree."""


def temporary_name() -> bytes:
    """Return a name for a hidden file or directory, which no other process guesses."""
    return b".paracle-" + os.urandom(8).hex().encode("ascii")


def write_all(fd: int, data: Union[bytes, memoryview]) -> None:
    """Write all of the data to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pack(walk: Walk, links: bool) -> Iterator[bytes]:
    """The stream of what the walk finds; an empty piece for each entry that is left out."""
    for found in walk:
        kind = found.status.st_mode
        if stat.S_ISDIR(kind):
            yield _pack_entry(walk, FOLDER, found, 0)
        elif stat.S_ISREG(kind):
            yield from _pack_file(walk, found)
        elif stat.S_ISLNK(kind) and links:
            target = os.readlink(found.name, dir_fd=walk.position.fd)
            yield _pack_entry(walk, LINK, found, len(target)) + target
        else:
            walk.skipped += 1
            yield b""
    yield ENTRY.pack(END, 0, 0, 0)


def _pack_entry(walk: Walk, kind: int, found: Entry, size: int) -> bytes:
    walk.packed += 1
    mode = stat.S_IMODE(found.status.st_mode)
    return ENTRY.pack(kind, mode, len(found.path), size) + found.path


def _pack_file(walk: Walk, found: Entry) -> Iterator[bytes]:
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
        # If one read reached the end, the size is what was read, however the file changes.
        size = len(data) if len(data) < CHUNK else max(status.st_size, len(data))
        yield _pack_entry(walk, FILE, found, size) + data
        yield from _read_rest(fd, size - len(data))
    finally:
        os.close(fd)


def _read_rest(fd: int, left: int) -> Iterator[bytes]:
    while left:
        data = os.read(fd, min(left, CHUNK))
        if not data:
            raise OSError(errno.ESTALE, "the file became shorter while it was read")
        left -= len(data)
        yield data


class TreeWriter:
    """Create the tree of a stream in a new, empty directory, given as a descriptor.

    Files are created with O_EXCL, so a name that comes twice is refused. A directory must have come
    before its entries.
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
        self._header = bytearray()
        self._need = ENTRY.size
        self._content_left = 0
        self._mode = 0
        self._name = b""
        self._file = -1
        self._target: Optional[bytearray] = None  # of the link whose content is arriving
        self._parent = -1
        self._parent_path: Optional[bytes] = None

    def feed(self, data: bytes) -> None:
        """Process the next bytes. After a TreeError or OSError only close() may be called."""
        view = memoryview(data)
        while view:
            if self.finished:
                raise TreeError("bytes after the end of the tree")
            if self._content_left:
                part = view[: self._content_left]
                self._feed_content(part)
            else:
                part = view[: self._need - len(self._header)]
                self._feed_header(part)
            view = view[len(part) :]

    def finish(self) -> int:
        """Return the number of entries. Raises TreeError if the END entry has not come."""
        self.close()
        if not self.finished:
            raise TreeError("the tree is cut off")
        return self.entries

    def close(self) -> None:
        """Close the descriptors of the file and the directory that are being written."""
        for fd in (self._file, self._parent):
            if fd >= 0:
                os.close(fd)
        self._file = self._parent = -1
        self._parent_path = None

    def _feed_header(self, part: memoryview) -> None:
        self._header += part
        if len(self._header) < self._need:
            return
        kind, mode, length, size = ENTRY.unpack_from(self._header)
        if self._need == ENTRY.size and length:
            if length > MAX_NAME:
                raise TreePathError("a name of %d bytes is too long" % length)
            self._need += length
            return
        path = bytes(self._header[ENTRY.size :])
        self._header.clear()
        self._need = ENTRY.size
        self._begin_entry(kind, mode, path, size)

    def _begin_entry(self, kind: int, mode: int, path: bytes, size: int) -> None:
        if kind == END:
            if mode or path or size:
                raise TreeError("the end of the tree is malformed")
            self.finished = True
            return
        self._count_entry(size)
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
            self._finish_entry()

    def _count_entry(self, size: int) -> None:
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

    def _feed_content(self, part: memoryview) -> None:
        if self._target is not None:
            self._target += part
        else:
            write_all(self._file, part)
        self._content_left -= len(part)
        if not self._content_left:
            self._finish_entry()

    def _finish_entry(self) -> None:
        if self._target is not None:
            target, self._target = bytes(self._target), None
            if b"\0" in target:
                raise TreePathError("the target of a link contains a null character")
            os.symlink(target, self._name, dir_fd=self._parent)
        elif self._file >= 0:
            os.fchmod(self._file, self._mode)
            os.close(self._file)
            self._file = -1


def check_path(path: bytes) -> List[bytes]:
    """Split a relative path into its parts. Raises TreePathError unless each is a plain name."""
    parts = path.split(b"/")
    for part in parts:
        if part in (b"", b".", b"..") or b"\0" in part or len(part) > MAX_PART:
            raise TreePathError("%r is not a plain relative path" % path[:200])
    if len(parts) > MAX_DEPTH + 1:
        raise TreePathError("nested deeper than %d directories" % MAX_DEPTH)
    return parts
