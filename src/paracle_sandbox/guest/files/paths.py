"""Confine the paths of file operations to the sandbox's own directories, the roots.

The roots are the working directory, /tmp, and the directories that the host names with a request:
volumes, and directories that were made writable.

A path is first split as text (`Roots.locate`), and then walked one name at a time from a descriptor
of its root (`resolve`). The kernel never follows a link for us: every open has O_NOFOLLOW, no ".."
reaches the kernel, and the target of a link is checked like any other path. A directory that is
swapped for a link during the walk therefore cannot lead out of the root.

openat2 with RESOLVE_BENEATH cannot be used: it refuses absolute links that stay inside, such as
/workspace/current -> /workspace/v2, which ordinary programs make.
"""

import errno
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple


def open_flags(*names: str) -> int:
    """Combine those of the named flags that this system has.

    The host uses this module on its own disk, too, and may be a Mac, which lacks O_PATH.
    """
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


DIRECTORY = open_flags("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC")
MAX_TEXT = 64 << 10
MAX_LINKS = 40
# The target of a link may be "a/../a/../...". Each ".." starts the walk again, and that must end.
MAX_STEPS = 100000
SHOWN = 300


class FileError(Exception):
    """A file operation was refused or has failed. It becomes an ERROR frame."""

    def __init__(self, code: str, message: str, number: Optional[int] = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.number = number


_CODES = {
    errno.ENOENT: ("not_found", "File not found"),
    errno.EEXIST: ("exists", "Already exists"),
    errno.EISDIR: ("is_directory", "Is a directory"),
    errno.ENOTDIR: ("not_directory", "Not a directory"),
    errno.ENOTEMPTY: ("not_empty", "Directory not empty"),
    errno.EACCES: ("permission", "Permission denied"),
    errno.EPERM: ("permission", "Permission denied"),
    errno.EROFS: ("permission", "Read-only file system"),
    errno.EBUSY: ("permission", "In use by the system"),
    errno.ENOSPC: ("no_space", "No space left in the sandbox"),
    errno.EDQUOT: ("no_space", "No space left in the sandbox"),
    errno.EFBIG: ("too_large", "File too large"),
    errno.ENAMETOOLONG: ("invalid", "Name too long"),
    errno.ELOOP: ("invalid", "Too many links"),
    errno.ENXIO: ("invalid", "Not a regular file"),
    errno.EINVAL: ("invalid", "Not possible"),
    errno.ESTALE: ("invalid", "Changed while it was being read"),
}


def to_file_error(error: OSError, text: str) -> FileError:
    """Build the error for an operation on the path ``text``, in plain words."""
    number = error.errno or 0
    code, message = _CODES.get(number, ("internal", os.strerror(number)))
    return FileError(code, "%s: %s" % (message, shorten(text)), error.errno)


def shorten(text: str) -> str:
    """Cut a path that is too long for an error message."""
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def encode(text: str) -> bytes:
    """Encode a name. os.fsencode would let the locale inside the sandbox change names."""
    return text.encode("utf-8", "surrogateescape")


def decode(name: bytes) -> str:
    """Decode a name, the reverse of `encode`."""
    return name.decode("utf-8", "surrogateescape")


def split(path: bytes) -> List[bytes]:
    """Split a path into its names, without empty names and "."."""
    return [name for name in path.split(b"/") if name not in (b"", b".")]


def collapse(names: List[bytes]) -> Optional[List[bytes]]:
    """Resolve each ".." as text. Returns None if that leads above the start."""
    kept: List[bytes] = []
    for name in names:
        if name != b"..":
            kept.append(name)
        elif kept:
            kept.pop()
        else:
            return None
    return kept


class Location(NamedTuple):
    """A confined path: a root, and the names below it."""

    root: List[bytes]
    names: List[bytes]

    @property
    def text(self) -> str:
        """The absolute path, for messages and entries."""
        return decode(b"/" + b"/".join(self.root + self.names))


class Roots:
    """The directories that file operations may touch."""

    def __init__(self, setup: Dict[str, Any], places: object = None) -> None:
        working_dir = split(encode(setup["working_dir"]))
        self.tmp_dir = encode(setup.get("tmp_dir", "/tmp"))
        others = [split(_check_path(one)) for one in places] if isinstance(places, list) else []
        self._working_dir = working_dir
        # A root may lie within another one: paths below it belong to the inner root.
        self._all = sorted([working_dir, split(self.tmp_dir), *others], key=len, reverse=True)

    def locate(self, text: object) -> Location:
        """Split a requested path. Raises FileError if it is no path or leaves all roots."""
        path = _check_path(text)
        root, names = self.find(path) if path[:1] == b"/" else (self._working_dir, split(path))
        kept = None if root is None else collapse(names)
        if root is None or kept is None:
            raise path_escape_error(decode(path))
        return Location(root, kept)

    def find(self, path: bytes) -> Tuple[Optional[List[bytes]], List[bytes]]:
        """Find the root of an absolute path. Returns it and the names below it."""
        return self.find_names(split(path))

    def find_names(self, names: List[bytes]) -> Tuple[Optional[List[bytes]], List[bytes]]:
        """Find the root of an absolute path that was split already; None if there is none."""
        for root in self._all:
            if root and names[: len(root)] == root:
                return root, names[len(root) :]
        return None, names


def _check_path(text: object) -> bytes:
    if not isinstance(text, str) or not text:
        raise FileError("invalid", "A path must be a string that is not empty")
    try:
        path = encode(text)
    except UnicodeEncodeError:
        raise FileError("invalid", "A path contains characters that UTF-8 cannot encode") from None
    if b"\0" in path:
        raise FileError("invalid", "A path contains a null character")
    if len(path) > MAX_TEXT:
        raise FileError("invalid", "Path too long: %s" % shorten(text))
    return path


def path_escape_error(text: str) -> FileError:
    """Build the error for a path that leaves the roots."""
    return FileError(
        "path_escape", "The path leaves the sandbox's own directories: %s" % shorten(text)
    )


def resolve(
    roots: Roots, location: Location, follow: bool = True, make_parents: bool = False
) -> Tuple[int, bytes]:
    """Open the directory that holds the location.

    Returns its descriptor (O_PATH) and the last name. The name is "." if the location is a root
    itself. With `follow`, a link at the end was followed. The name may still become a link at any
    time, so open it with O_NOFOLLOW. Raises FileError.
    """
    walk = _Walk(roots, location)
    try:
        return walk.run(follow, make_parents)
    except OSError as error:
        walk.close()
        raise to_file_error(error, location.text) from None
    except BaseException:
        walk.close()
        raise


def real_path(roots: Roots, location: Location) -> str:
    """Return the path of the location without links. Its last name need not exist."""
    walk = _Walk(roots, location)
    try:
        _, name = walk.run(follow=True, make_parents=False)
        return decode(b"/" + b"/".join(walk.trail + ([] if name == b"." else [name])))
    except OSError as error:
        raise to_file_error(error, location.text) from None
    finally:
        walk.close()


class _Walk:
    """The walk along one path, one name at a time."""

    def __init__(self, roots: Roots, location: Location) -> None:
        self._roots = roots
        self._place = location
        self._root = location.root
        self._trail: List[bytes] = []  # real names, from the root to where we are
        self._pending = location.names[::-1]
        self._links = 0
        self._fd = -1

    @property
    def trail(self) -> List[bytes]:
        """The names of the directory that the walk has reached."""
        return self._root + self._trail

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def run(self, follow: bool, make_parents: bool) -> Tuple[int, bytes]:
        try:
            self._restart()
        except NotADirectoryError:
            if self._pending:
                raise
            # This root is a single file of the host that was mounted into the sandbox.
            self._fd = os.open(b"/" + b"/".join(self._root[:-1]), DIRECTORY & ~os.O_NOFOLLOW)
            return self._fd, self._root[-1]
        for _ in range(MAX_STEPS):
            if not self._pending:
                return self._fd, b"."
            name = self._pending.pop()
            if name == b"..":
                self._step_back()
            elif self._pending:
                self._enter(name, make_parents)
            elif not (follow and self._follow(name)):
                return self._fd, name
        raise OSError(errno.ELOOP, "too many steps")

    def _restart(self) -> None:
        self.close()
        self._trail = []
        # The root comes from the sandbox's configuration, so a link in it is intended.
        path = b"/" + b"/".join(self._root)
        self._fd = os.open(path, DIRECTORY & ~os.O_NOFOLLOW)

    def _step_back(self) -> None:
        """Go up one directory: walk again from the root, without the last name.

        This is only needed for ".." in the target of a link.
        """
        if self._trail:
            self._pending.extend(self._trail[-2::-1])
        else:
            self._leave_root()
        self._restart()

    def _leave_root(self) -> None:
        """Go above the root. Raises FileError unless the rest of the path leads to another root."""
        names = collapse(self._root[:-1] + self._pending[::-1])
        root, rest = (None, []) if names is None else self._roots.find_names(names)
        if root is None:
            raise path_escape_error(self._place.text)
        self._root = root
        self._pending = rest[::-1]

    def _enter(self, name: bytes, make: bool) -> None:
        try:
            inner = os.open(name, DIRECTORY, dir_fd=self._fd)
        except FileNotFoundError:
            if not make:
                raise
            _make_directory(name, self._fd)
            self._pending.append(name)
        except OSError as error:
            # Both a link and a file give ENOTDIR or ELOOP. A file ends the walk.
            if error.errno not in (errno.ENOTDIR, errno.ELOOP) or not self._follow(name):
                raise
        else:
            self.close()
            self._fd = inner
            self._trail.append(name)

    def _follow(self, name: bytes) -> bool:
        """Replace the name of a link by its target. Returns False if it is no link."""
        try:
            target = os.readlink(name, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return False
            raise
        self._links += 1
        if self._links > MAX_LINKS:
            raise OSError(errno.ELOOP, "too many links")
        names = split(target)
        if target[:1] == b"/":
            root, names = self._roots.find(target)
            if root is None:
                raise path_escape_error(self._place.text)
            self._root = root
            self._restart()
        self._pending.extend(reversed(names))
        return True


def _make_directory(name: bytes, parent: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        pass  # another process was faster; the walk opens the name again
