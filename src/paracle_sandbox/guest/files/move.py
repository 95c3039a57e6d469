"""The move operation: a rename, or a copy and a removal between two file systems.

/workspace and /tmp may be different mounts, and the kernel does not rename between mounts.
"""

import errno
import os
import stat
from typing import Tuple

from ...channel.frames import CHUNK
from .archive import CREATE, READ, pack, temporary_name, write_all
from .dirwalk import Walk, remove_tree
from .job import Message, Wire, Work
from .paths import DIRECTORY, FileError, Location, Roots, resolve, to_file_error
from .staging import Staging

_TARGET_CODES = {"not_found": "target_not_found", "path_escape": "target_path_escape"}


def move(request: Message, wire: Wire, roots: Roots) -> Work:
    """Move a file, link or directory. A file at the target is replaced."""
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
        # Both directories were opened, so only the source itself can be missing now.
        blamed = source if error.errno == errno.ENOENT else target
        raise to_file_error(error, blamed.text) from None
    finally:
        for fd, _ in ends:
            os.close(fd)


def _resolve_target(roots: Roots, target: Location) -> Tuple[int, bytes]:
    try:
        return resolve(roots, target, follow=False)
    except FileError as error:
        # The host's error names one of the two paths, so the code says which one it is.
        code = _TARGET_CODES.get(error.code, error.code)
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
    _remove_empty_directory(new, new_name)
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
                raise OSError(errno.ENXIO, "holds a socket, fifo or device")
            for _ in staging.settle():
                yield True
        finally:
            staging.discard()
    finally:
        walk.close()
    return {}


def _remove_empty_directory(parent: int, name: bytes) -> None:
    """Remove an empty directory at the target, as rename would.

    Raises OSError for anything else.
    """
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
            remove_temporary(new, temporary)
    finally:
        os.close(source)
    return {}


def _copy_link(old: int, old_name: bytes, new: int, new_name: bytes) -> None:
    temporary = temporary_name()
    os.symlink(os.readlink(old_name, dir_fd=old), temporary, dir_fd=new)
    try:
        os.rename(temporary, new_name, src_dir_fd=new, dst_dir_fd=new)
    finally:
        remove_temporary(new, temporary)


def remove_temporary(parent: int, temporary: bytes) -> None:
    """Remove a temporary file if it is still there, because it was not renamed."""
    try:
        os.unlink(temporary, dir_fd=parent)
    except FileNotFoundError:
        pass
