"""Reading and writing one file inside the sandbox."""

import errno
import os
import stat
from typing import Generator, Optional

from ..channel.frames import CHUNK
from .jobs import Message, Wire, Work
from .moves import discard
from .paths import FileError, Place, Roots, resolve
from .trees import CREATE, READ, temporary_name, write_all

MAX_OFFSET = 1 << 62
APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read(request: Message, wire: Wire, roots: Roots) -> Work:
    place = roots.locate(request.get("path"))
    start = _number(request, "offset", 0)
    left = _number(request, "length", MAX_OFFSET)
    fd = _open_regular(roots, place, READ)
    try:
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
    """Writes beside the target and renames, so that a reader sees the old or the new file."""
    parents = bool(request.get("parents", True))
    parent, name = resolve(roots, place, follow=False, make_parents=parents)
    temporary = temporary_name()
    try:
        mode = _mode(request, parent, name)
        fd = os.open(temporary, CREATE, 0o600, dir_fd=parent)
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


def _mode(request: Message, parent: int, name: bytes) -> int:
    """The mode asked for, or that of the file to be replaced."""
    mode = 0o644
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        if stat.S_ISREG(status.st_mode):
            mode = status.st_mode
    return _number(request, "mode", mode) & 0o777


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


def _number(request: Message, key: str, default: int) -> int:
    value = request.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 <= value <= MAX_OFFSET:
        raise FileError("invalid", "%s must be a number that is not negative" % key)
    return value
