"""The operations that read and write one file."""

import errno
import os
import stat
from typing import Generator, Optional

from ...channel.frames import CHUNK
from .archive import CREATE, READ, temporary_name, write_all
from .job import MAX_OFFSET, Message, Wire, Work, read_number, too_large_error
from .move import remove_temporary
from .paths import FileError, Location, Roots, resolve

IN_PLACE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# These errors say that no new file can be created in a directory. Files in it may be writable.
NOT_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS)
APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read(request: Message, wire: Wire, roots: Roots) -> Work:
    """Send a file, or "length" bytes of it from "offset" on."""
    location = roots.locate(request.get("path"))
    start = read_number(request, "offset", 0)
    left = read_number(request, "length", MAX_OFFSET)
    most = read_number(request, "max_bytes", MAX_OFFSET)
    fd = _open_regular(roots, location, READ)
    try:
        if os.fstat(fd).st_size - start > most and left > most:
            raise too_large_error(location, most)
        sent = 0
        while left:
            while wire.credit <= 0:
                yield False
            wanted = min(CHUNK, left, wire.credit)
            data = os.pread(fd, wanted, start + sent)
            if data:
                wire.data(data)
            sent += len(data)
            left -= len(data)
            if len(data) < wanted:
                break
            yield True
        return {"size": sent, "mode": stat.S_IMODE(os.fstat(fd).st_mode)}
    finally:
        os.close(fd)


def write(request: Message, wire: Wire, roots: Roots) -> Work:
    """Receive a file, and replace the one at the path or append to it."""
    location = roots.locate(request.get("path"))
    if request["path"].endswith("/"):
        raise FileError("is_directory", "Is a directory: %s" % location.text)
    if request.get("append"):
        fd = _open_existing(roots, location)
        if fd is not None:
            return (yield from _append(fd, wire))
    return (yield from _replace(request, wire, roots, location))


def _replace(request: Message, wire: Wire, roots: Roots, location: Location) -> Work:
    """Write a temporary file beside the target and rename it: readers see the old or the new file.

    A link is followed, and a file that this user may not write is refused, as when a program opens
    it. If no file can be created beside the target, or the target belongs to another user, the
    content is written into the existing file.
    """
    parents = bool(request.get("parents", True))
    parent, name = resolve(roots, location, make_parents=parents)
    temporary = temporary_name()
    try:
        status = _check_writable(parent, name)
        mode = read_number(request, "mode", 0o644 if status is None else status.st_mode) & 0o777
        if status is not None and status.st_uid != os.geteuid():
            return (yield from _rewrite(request, wire, roots, parent, name))
        try:
            fd = os.open(temporary, CREATE, 0o600, dir_fd=parent)
        except OSError as error:
            if status is None or error.errno not in NOT_BESIDE:
                raise
            return (yield from _rewrite(request, wire, roots, parent, name))
        try:
            size = yield from _receive(fd, wire)
            os.fchmod(fd, mode)
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        finally:
            os.close(fd)
            remove_temporary(parent, temporary)
        return {"size": size}
    finally:
        os.close(parent)


def _check_writable(parent: int, name: bytes) -> Optional[os.stat_result]:
    """Return the status of the file, or None if there is none.

    Raises OSError if this user may not write it.
    """
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "not a regular file")
    try:
        os.close(os.open(name, IN_PLACE, dir_fd=parent))
    except OSError as error:
        if error.errno != errno.ETXTBSY:  # a running program cannot be written, but can be replaced
            raise
    return status


def _rewrite(request: Message, wire: Wire, roots: Roots, parent: int, name: bytes) -> Work:
    """Receive the content in a file without a name, and then write it into the existing file."""
    draft = _nameless_file(roots.tmp_dir)
    try:
        size = yield from _receive(draft, wire)
        fd = os.open(name, IN_PLACE, dir_fd=parent)
        try:
            os.ftruncate(fd, 0)
            position = 0
            while position < size:
                data = os.pread(draft, CHUNK, position)
                write_all(fd, data)
                position += len(data)
                yield True
            if request.get("mode") is not None and os.fstat(fd).st_uid == os.geteuid():
                os.fchmod(fd, read_number(request, "mode", 0) & 0o777)
        finally:
            os.close(fd)
    finally:
        os.close(draft)
    return {"size": size}


def _nameless_file(directory: bytes) -> int:
    path = os.path.join(directory, temporary_name())
    fd = os.open(path, (CREATE & ~os.O_WRONLY) | os.O_RDWR, 0o600)
    os.unlink(path)
    return fd


def _receive(fd: int, wire: Wire) -> Generator[bool, Optional[bytes], int]:
    size = 0
    while True:
        data = yield False
        if data == b"":
            return size
        if data:
            write_all(fd, data)
            size += len(data)
            wire.consumed(len(data))


def _open_existing(roots: Roots, location: Location) -> Optional[int]:
    try:
        return _open_regular(roots, location, APPEND)
    except FileError as error:
        if error.code != "not_found":
            raise
    except FileNotFoundError:
        pass
    return None


def _append(fd: int, wire: Wire) -> Work:
    """Append to the file.

    Other writers keep what they append; a failure removes what we appended.
    """
    start = os.fstat(fd).st_size
    written = 0
    whole = False
    try:
        while not whole:
            data = yield False
            whole = data == b""
            view = memoryview(data or b"")
            while view:
                count = os.write(fd, view)
                written += count
                view = view[count:]
            wire.consumed(len(data or b""))
        return {"size": written}
    finally:
        if not whole and os.fstat(fd).st_size == start + written:
            os.ftruncate(fd, start)
        os.close(fd)


def _open_regular(roots: Roots, location: Location, flags: int) -> int:
    """Open a regular file. ``flags`` must have O_NONBLOCK, so that the open of a fifo returns."""
    parent, name = resolve(roots, location)
    try:
        fd = os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    raise OSError(errno.ENXIO, "not a regular file")
