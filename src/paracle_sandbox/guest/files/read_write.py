"""Reading and writing one file inside the sandbox."""

import errno
import os
import stat
from typing import Generator, Optional

from ...channel.frames import CHUNK
from .archive import CREATE, READ, temporary_name, write_all
from .job import MAX_OFFSET, Message, Wire, Work, number_of, too_large
from .move import discard
from .paths import FileError, Place, Roots, resolve

IN_PLACE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Why no file can be made beside another that can be written.
NOT_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS)
APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read(request: Message, wire: Wire, roots: Roots) -> Work:
    place = roots.locate(request.get("path"))
    start = number_of(request, "offset", 0)
    left = number_of(request, "length", MAX_OFFSET)
    most = number_of(request, "max_bytes", MAX_OFFSET)
    fd = _open_regular(roots, place, READ)
    try:
        if os.fstat(fd).st_size - start > most and left > most:
            raise too_large(place, most)
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
    place = roots.locate(request.get("path"))
    if request["path"].endswith("/"):
        raise FileError("is_directory", "Is a directory: %s" % place.text)
    if request.get("append"):
        fd = _open_existing(roots, place)
        if fd is not None:
            return (yield from _append(fd, wire))
    return (yield from _replace(request, wire, roots, place))


def _replace(request: Message, wire: Wire, roots: Roots, place: Place) -> Work:
    """Writes beside the target and renames, so that a reader sees the old or the new file.

    As for a program that opens it, a link is followed, and what this user may not write is
    refused. Where nothing can be made beside it, or a new file would not be its owner's, the
    content is put into the file that is there.
    """
    parents = bool(request.get("parents", True))
    parent, name = resolve(roots, place, make_parents=parents)
    temporary = temporary_name()
    try:
        status = _writable(parent, name)
        mode = number_of(request, "mode", 0o644 if status is None else status.st_mode) & 0o777
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
            discard(parent, temporary)
        return {"size": size}
    finally:
        os.close(parent)


def _writable(parent: int, name: bytes) -> Optional[os.stat_result]:
    """The status of a file that this user may write; None if there is none. Else OSError."""
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
        if error.errno != errno.ETXTBSY:  # a program that runs can be replaced, if not written to
            raise
    return status


def _rewrite(request: Message, wire: Wire, roots: Roots, parent: int, name: bytes) -> Work:
    """Puts the content into the file, once all of it has arrived in a file without a name."""
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
                os.fchmod(fd, number_of(request, "mode", 0) & 0o777)
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


def _open_existing(roots: Roots, place: Place) -> Optional[int]:
    try:
        return _open_regular(roots, place, APPEND)
    except FileError as error:
        if error.code != "not_found":
            raise
    except FileNotFoundError:
        pass
    return None


def _append(fd: int, wire: Wire) -> Work:
    """Adds in place: other writers of the file keep theirs, and a failure takes ours back."""
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


def _open_regular(roots: Roots, place: Place, flags: int) -> int:
    """Opens a regular file without waiting for anybody; `flags` have O_NONBLOCK, for fifos."""
    parent, name = resolve(roots, place)
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
