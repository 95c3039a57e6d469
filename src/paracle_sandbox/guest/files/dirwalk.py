"""Walk through directory trees that other processes may be changing.

One descriptor is open at a time, whatever the depth, and names are never joined to a path. The walk
goes down by opening one name without following links, and up by opening "..", which must be the
directory that it came from. So a tree may be deeper than PATH_MAX, and a directory that is swapped
or moved away meanwhile ends the walk instead of leading it elsewhere.

Both ends use this module: the guest in the workspace, and the host for trees that it copies in and
out.
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


class TreePosition:
    """A position in a tree. It owns its descriptor, but not the one that it was created from."""

    def __init__(self, start: int) -> None:
        self.fd = os.open(b".", DIRECTORY, dir_fd=start)
        self._parents: List[Tuple[int, int]] = []

    @property
    def depth(self) -> int:
        """The number of directories between the start and this position."""
        return len(self._parents)

    def enter(self, name: bytes, unlock: bool = False) -> None:
        """Go down into a directory.

        With `unlock`, the owner is given back the permissions that it removed from itself.
        """
        inner = os.open(name, DIRECTORY, dir_fd=self.fd)
        try:
            if unlock:
                _unlock(inner)
            # Without search permission there is no way back up, so this fails before going in.
            os.close(os.open(b"..", DIRECTORY, dir_fd=inner))
            self._parents.append(_identity(self.fd))
        except OSError:
            os.close(inner)
            raise
        self._move(inner)

    def leave(self) -> None:
        """Go up again. Raises OSError if the directory was moved meanwhile."""
        outer = os.open(b"..", DIRECTORY, dir_fd=self.fd)
        if _identity(outer) != self._parents.pop():
            os.close(outer)
            raise OSError(errno.ESTALE, "the directory was moved")
        self._move(outer)

    def scan(self) -> "Iterator[os.DirEntry[str]]":
        """Yield the entries of this directory, which are read on demand."""
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
        # Only O_PATH can open a directory of mode 000, and fchmod refuses such a descriptor.
        os.chmod("/proc/self/fd/%d" % directory, 0o700)
    except (PermissionError, FileNotFoundError):
        pass  # not ours, or no /proc: the next step fails and says so


def _identity(fd: int) -> Tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class Entry(NamedTuple):
    """One file, directory or link that a walk has found."""

    path: bytes  # relative to the top
    name: bytes
    status: os.stat_result


class Walk:
    """Yield everything below a directory, each directory before its entries.

    Entries that cannot be read are skipped and counted; with `strict`, the error is raised. Entries
    that lie deeper than a path can name are not visited, because the output would grow with the
    square of the depth.
    """

    def __init__(self, top: int, recursive: bool = True, strict: bool = False) -> None:
        self.position = TreePosition(top)
        self.packed = 0  # entries put into a tree stream
        self.skipped = 0
        self._recursive = recursive
        self._strict = strict
        self._pending: List[List[bytes]] = []  # names of directories to visit, for each level
        self._prefix: List[bytes] = []

    def close(self) -> None:
        self.position.close()

    def skip(self, error: OSError) -> None:
        """Count an entry that cannot be read; with `strict`, raise the error."""
        if self._strict:
            raise error
        self.skipped += 1

    def __iter__(self) -> Iterator[Entry]:
        yield from self._visit_directory()
        while self._pending:
            if not self._pending[-1]:
                self._pending.pop()
                if self._pending:
                    self._prefix.pop()
                    self.position.leave()
            elif self._enter(self._pending[-1].pop()):
                yield from self._visit_directory()

    def _enter(self, name: bytes) -> bool:
        try:
            self.position.enter(name)
        except OSError as error:
            self.skip(error)
            return False
        self._prefix.append(name + b"/")
        return True

    def _visit_directory(self) -> Iterator[Entry]:
        below: List[bytes] = []
        self._pending.append(below)
        prefix = b"".join(self._prefix)
        try:
            for entry in self.position.scan():
                found = self._read_entry(entry, prefix)
                if found is None:
                    continue
                yield found
                if self._recursive and stat.S_ISDIR(found.status.st_mode):
                    below.append(found.name)
        except PermissionError as error:
            self.skip(error)

    def _read_entry(self, entry: "os.DirEntry[str]", prefix: bytes) -> Optional[Entry]:
        name = os.fsencode(entry.name)
        if len(prefix) + len(name) > MAX_NAME or self.position.depth >= MAX_DEPTH:
            self.skip(OSError(errno.ENAMETOOLONG, "nested too deeply"))
            return None
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None  # removed since the directory was read
        return Entry(prefix + name, name, status)


def remove_tree(parent: int, name: bytes) -> Iterator[None]:
    """Remove a directory with everything in it. Yields after each slice of work."""
    position = TreePosition(parent)
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
                # A process created something in it meanwhile: try again, but not for ever.
                refills += 1
                if error.errno != errno.ENOTEMPTY or refills > MAX_REFILLS:
                    raise
            yield
    finally:
        position.close()


def _enter_or_unlink(position: TreePosition, name: bytes) -> bool:
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


def _clear(position: TreePosition) -> Generator[None, None, List[bytes]]:
    """Unlink all files here, and return the names of the directories."""
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
    """Move the entries of one directory into another, replacing files. Yields after each of them.

    Directories that exist on both sides are merged, and stay in the source as empty directories.
    Raises OSError if a file is in the way of a directory, or a directory in the way of a file.
    """
    here, there = TreePosition(source), TreePosition(target)
    try:
        todo = [_list_names(here)]
        while todo:
            if not todo[-1]:
                todo.pop()
                if todo:
                    here.leave()
                    there.leave()
                    todo[-1].pop()
            elif _try_rename(todo[-1][-1], here.fd, there.fd):
                todo[-1].pop()
            else:
                here.enter(todo[-1][-1])
                there.enter(todo[-1][-1])
                todo.append(_list_names(here))
            yield
    finally:
        here.close()
        there.close()


def _list_names(position: TreePosition) -> List[bytes]:
    return [os.fsencode(entry.name) for entry in position.scan()]


def _try_rename(name: bytes, source: int, target: int) -> bool:
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
