"""Moves through directory trees that somebody else may be changing.

One descriptor is open at a time, whatever the depth, and paths are never put together: down is
an open of one name without following links, up is an open of ".." that must give the directory
we came from. So a tree may be deeper than PATH_MAX, and a directory swapped or moved away
meanwhile ends the walk instead of leading it elsewhere.

Used on both ends: by the guest in the workspace, by the host for what it copies in and out.
"""

import errno
import os
import stat
from typing import Generator, Iterator, List, NamedTuple, Optional, Tuple

from .paths import DIRECTORY, open_flags

MAX_NAME = 4096
MAX_DEPTH = 512
SLICE = 200
MAX_REFILLS = 100

_SCAN = os.O_RDONLY | open_flags("O_DIRECTORY", "O_CLOEXEC")


class Descent:
    """A position in a tree. Owns its descriptor, not the one it was started from."""

    def __init__(self, start: int) -> None:
        self.fd = os.open(b".", DIRECTORY, dir_fd=start)
        self._parents: List[Tuple[int, int]] = []

    @property
    def depth(self) -> int:
        return len(self._parents)

    def enter(self, name: bytes, unlock: bool = False) -> None:
        """Goes down. With `unlock`, rights that the owner took from itself are given back."""
        inner = os.open(name, DIRECTORY, dir_fd=self.fd)
        try:
            if unlock:
                _unlock(inner)
            # Without the right to search it there is no way back: refuse before going in.
            os.close(os.open(b"..", DIRECTORY, dir_fd=inner))
            self._parents.append(_identity(self.fd))
        except OSError:
            os.close(inner)
            raise
        self._move(inner)

    def leave(self) -> None:
        outer = os.open(b"..", DIRECTORY, dir_fd=self.fd)
        if _identity(outer) != self._parents.pop():
            os.close(outer)
            raise OSError(errno.ESTALE, "the directory was moved")
        self._move(outer)

    def scan(self) -> "Iterator[os.DirEntry[str]]":
        """The entries of this directory, read as they are asked for."""
        fd = os.open(b".", _SCAN, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _move(self, fd: int) -> None:
        os.close(self.fd)
        self.fd = fd


def _unlock(directory: int) -> None:
    if stat.S_IMODE(os.fstat(directory).st_mode) & 0o700 == 0o700:
        return
    try:
        # fchmod refuses an O_PATH descriptor, and O_PATH is what opens a mode-000 directory.
        os.chmod("/proc/self/fd/%d" % directory, 0o700)
    except (PermissionError, FileNotFoundError):
        pass  # not ours, or no /proc: the next step fails and says so


def _identity(fd: int) -> Tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class Found(NamedTuple):
    path: bytes  # relative to the top
    name: bytes
    status: os.stat_result


class Walk:
    """Everything below a directory, each directory before what is in it.

    What cannot be read is skipped and counted, or raised when `strict`. What lies deeper than
    any path can name is not visited: the output would grow with the square of the depth.
    """

    def __init__(self, top: int, recursive: bool = True, strict: bool = False) -> None:
        self.position = Descent(top)
        self.packed = 0  # entries put into a tree stream
        self.skipped = 0
        self._recursive = recursive
        self._strict = strict
        self._pending: List[List[bytes]] = []  # names of directories to visit, for each level
        self._prefix: List[bytes] = []

    def close(self) -> None:
        self.position.close()

    def skip(self, error: OSError) -> None:
        if self._strict:
            raise error
        self.skipped += 1

    def __iter__(self) -> Iterator[Found]:
        yield from self._directory()
        while self._pending:
            if not self._pending[-1]:
                self._pending.pop()
                if self._pending:
                    self._prefix.pop()
                    self.position.leave()
            elif self._enter(self._pending[-1].pop()):
                yield from self._directory()

    def _enter(self, name: bytes) -> bool:
        try:
            self.position.enter(name)
        except OSError as error:
            self.skip(error)
            return False
        self._prefix.append(name + b"/")
        return True

    def _directory(self) -> Iterator[Found]:
        below: List[bytes] = []
        self._pending.append(below)
        prefix = b"".join(self._prefix)
        try:
            for entry in self.position.scan():
                found = self._look(entry, prefix)
                if found is None:
                    continue
                yield found
                if self._recursive and stat.S_ISDIR(found.status.st_mode):
                    below.append(found.name)
        except PermissionError as error:
            self.skip(error)

    def _look(self, entry: "os.DirEntry[str]", prefix: bytes) -> Optional[Found]:
        name = os.fsencode(entry.name)
        if len(prefix) + len(name) > MAX_NAME or self.position.depth >= MAX_DEPTH:
            self.skip(OSError(errno.ENAMETOOLONG, "nested too deeply"))
            return None
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None  # removed since the directory was read
        return Found(prefix + name, name, status)


def remove_tree(parent: int, name: bytes) -> Iterator[None]:
    """Removes a directory with everything in it; yields after each slice of work."""
    position = Descent(parent)
    todo = [[name]]  # for each level the directories to remove, the current one last
    refills = 0
    try:
        while todo:
            if todo[-1]:
                if _enter_or_unlink(position, todo[-1][-1]):
                    todo.append((yield from _clear(position)))
                else:
                    todo[-1].pop()
                continue
            todo.pop()
            if not todo:
                return
            position.leave()
            try:
                os.rmdir(todo[-1][-1], dir_fd=position.fd)
                todo[-1].pop()
            except OSError as error:
                # Something was made in it meanwhile: once more, but not for ever.
                refills += 1
                if error.errno != errno.ENOTEMPTY or refills > MAX_REFILLS:
                    raise
            yield
    finally:
        position.close()


def _enter_or_unlink(position: Descent, name: bytes) -> bool:
    try:
        position.enter(name, unlock=True)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
    os.unlink(name, dir_fd=position.fd)  # it is no directory any more
    return False


def _clear(position: Descent) -> Generator[None, None, List[bytes]]:
    """Unlinks what is no directory here, and returns the names of the directories."""
    below: List[bytes] = []
    for count, entry in enumerate(position.scan(), 1):
        if entry.is_dir(follow_symlinks=False):
            below.append(os.fsencode(entry.name))
        else:
            _unlink(os.fsencode(entry.name), position.fd)
        if count % SLICE == 0:
            yield
    return below


def _unlink(name: bytes, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except (FileNotFoundError, IsADirectoryError):
        pass  # gone, or now a directory: the next pass finds it


def merge(source: int, target: int) -> Iterator[None]:
    """Moves what is in one directory into another, replacing files; yields after each slice.

    Directories that are on both sides are joined, and their empty shells stay in the source.
    A file in the way of a directory, or the reverse, is an OSError.
    """
    here, there = Descent(source), Descent(target)
    try:
        todo = [_names(here)]
        while todo:
            if not todo[-1]:
                todo.pop()
                if todo:
                    here.leave()
                    there.leave()
                    todo[-1].pop()
            elif _moved(todo[-1][-1], here.fd, there.fd):
                todo[-1].pop()
            else:
                here.enter(todo[-1][-1])
                there.enter(todo[-1][-1])
                todo.append(_names(here))
            yield
    finally:
        here.close()
        there.close()


def _names(position: Descent) -> List[bytes]:
    return [os.fsencode(entry.name) for entry in position.scan()]


def _moved(name: bytes, source: int, target: int) -> bool:
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
