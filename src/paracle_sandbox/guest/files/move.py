"""The move operation: a rename, or a copy and a removal where two file systems meet.

/workspace and /tmp may be different mounts, and between mounts there is no rename.
"""

import errno
import os
import stat
from typing import Tuple

from ...channel.frames import CHUNK
from .archive import CREATE, READ, pack, temporary_name, write_all
from .dirwalk import Walk, remove_tree
from .job import Message, Wire, Work
from .paths import DIRECTORY, FileError, Place, Roots, explain, resolve
from .staging import Staging

_OF_TARGET = {"not_found": "target_not_found", "path_escape": "target_path_escape"}


def move(request: Message, wire: Wire, roots: Roots) -> Work:
    source = roots.locate(request.get("source"))
    target = roots.locate(request.get("target"))
    ends = []
    try:
        ends.append(resolve(roots, source, follow=False))
        ends.append(_resolve_target(roots, target))
        (old, old_name), (new, new_name) = ends
        if b"." in (old_name, new_name):
            raise FileError("invalid", "The working directory itself cannot be moved or replaced")
        yield from _move(old, old_name, new, new_name)
        return {}
    except OSError as error:
        # Both directories were found, so what is missing now can only be the source.
        blamed = source if error.errno == errno.ENOENT else target
        raise explain(error, blamed.text) from None
    finally:
        for fd, _ in ends:
            os.close(fd)


def _resolve_target(roots: Roots, target: Place) -> Tuple[int, bytes]:
    try:
        return resolve(roots, target, follow=False)
    except FileError as error:
        # The host names one of the two paths, and has to know which.
        code = _OF_TARGET.get(error.code, error.code)
        raise FileError(code, error.message, error.number) from None


def _move(old: int, old_name: bytes, new: int, new_name: bytes) -> Work:
    try:
        os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)
        return {}
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    kind = os.stat(old_name, dir_fd=old, follow_symlinks=False).st_mode
    if stat.S_ISDIR(kind):
        yield from _copy_tree(old, old_name, new, new_name)
        for _ in remove_tree(old, old_name):
            yield True
        return {}
    if stat.S_ISREG(kind):
        yield from _copy_file(old, old_name, new, new_name)
    elif stat.S_ISLNK(kind):
        _copy_link(old, old_name, new, new_name)
    else:
        raise OSError(errno.ENXIO, "neither a file nor a directory nor a link")
    os.unlink(old_name, dir_fd=old)
    return {}


def _copy_tree(old: int, old_name: bytes, new: int, new_name: bytes) -> Work:
    _make_way(new, new_name)
    top = os.open(old_name, DIRECTORY, dir_fd=old)
    try:
        walk = Walk(top, strict=True)
    finally:
        os.close(top)
    try:
        staging = Staging(os.dup(new), new_name, links=True, mode_mask=0o777)
        try:
            for piece in pack(walk, links=True):
                staging.writer.feed(piece)
                yield True
            if walk.skipped:
                raise OSError(errno.ENXIO, "holds what cannot be copied")
            for _ in staging.settle():
                yield True
        finally:
            staging.discard()
    finally:
        walk.close()
    return {}


def _make_way(parent: int, name: bytes) -> None:
    """As rename would: an empty directory is replaced, anything else is refused."""
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        pass


def _copy_file(old: int, old_name: bytes, new: int, new_name: bytes) -> Work:
    temporary = temporary_name()
    source = os.open(old_name, READ, dir_fd=old)
    try:
        target = os.open(temporary, CREATE, 0o600, dir_fd=new)
        try:
            data = os.read(source, CHUNK)
            while data:
                write_all(target, data)
                yield True
                data = os.read(source, CHUNK)
            os.fchmod(target, stat.S_IMODE(os.fstat(source).st_mode))
            os.rename(temporary, new_name, src_dir_fd=new, dst_dir_fd=new)
        finally:
            os.close(target)
            discard(new, temporary)
    finally:
        os.close(source)
    return {}


def _copy_link(old: int, old_name: bytes, new: int, new_name: bytes) -> None:
    temporary = temporary_name()
    os.symlink(os.readlink(old_name, dir_fd=old), temporary, dir_fd=new)
    try:
        os.rename(temporary, new_name, src_dir_fd=new, dst_dir_fd=new)
    finally:
        discard(new, temporary)


def discard(parent: int, temporary: bytes) -> None:
    """Removes a temporary file, if it was not renamed."""
    try:
        os.unlink(temporary, dir_fd=parent)
    except FileNotFoundError:
        pass
