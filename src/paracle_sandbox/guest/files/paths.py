"""Confines the paths of file operations to the places that are the sandbox's own.

They are the working directory and /tmp, and what else the host names with a request: volumes, and
directories that were made writable.

A path is first taken apart as text (`Roots.locate`), then walked one name at a time from a
descriptor of its root (`resolve`). The kernel is never asked to follow anything: every open has
O_NOFOLLOW, no ".." reaches it, and the text of a link is held to the same rule as any path. A
directory that is swapped for a link during the walk therefore cannot lead out of the root.

openat2 with RESOLVE_BENEATH would not do: it refuses absolute links that stay inside, such as
/workspace/current -> /workspace/v2, which ordinary programs make.
"""

import errno
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple


def open_flags(*names: str) -> int:
    """Those that this system has: on its own disk the host, which may be a Mac, uses this too."""
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


DIRECTORY = open_flags("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC")
MAX_TEXT = 64 << 10
MAX_LINKS = 40
# A link may say "a/../a/../..."; each ".." starts the walk again, and that must end.
MAX_STEPS = 100000
SHOWN = 300


class FileError(Exception):
    """A file operation was refused or failed; becomes an ERROR frame."""

    def __init__(self, code: str, message: str, number: Optional[int] = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.number = number


_WORDS = {
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


def explain(error: OSError, text: str) -> FileError:
    """The failure of an operation on the path `text`, in plain words."""
    number = error.errno or 0
    code, words = _WORDS.get(number, ("internal", os.strerror(number)))
    return FileError(code, "%s: %s" % (words, shorten(text)), error.errno)


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def encode(text: str) -> bytes:
    """The bytes of a name. Not os.fsencode: the locale inside must not change names."""
    return text.encode("utf-8", "surrogateescape")


def decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def split(path: bytes) -> List[bytes]:
    return [name for name in path.split(b"/") if name not in (b"", b".")]


def collapse(names: List[bytes]) -> Optional[List[bytes]]:
    """The names with each ".." taken back, or None when that leaves the start."""
    kept: List[bytes] = []
    for name in names:
        if name != b"..":
            kept.append(name)
        elif kept:
            kept.pop()
        else:
            return None
    return kept


class Place(NamedTuple):
    """A confined path: the names below one of the roots."""

    root: List[bytes]
    names: List[bytes]

    @property
    def text(self) -> str:
        return decode(b"/" + b"/".join(self.root + self.names))


class Roots:
    """The directories that file operations may touch."""

    def __init__(self, setup: Dict[str, Any], places: object = None) -> None:
        working_dir = split(encode(setup["working_dir"]))
        self.tmp_dir = encode(setup.get("tmp_dir", "/tmp"))
        others = [split(_checked(one)) for one in places] if isinstance(places, list) else []
        self._working_dir = working_dir
        # The one that lies within another is meant by what is below it.
        self._all = sorted([working_dir, split(self.tmp_dir), *others], key=len, reverse=True)

    def locate(self, text: object) -> Place:
        """Where a requested path is. FileError when it is no path or leaves its root."""
        path = _checked(text)
        root, names = self.find(path) if path[:1] == b"/" else (self._working_dir, split(path))
        kept = None if root is None else collapse(names)
        if root is None or kept is None:
            raise escape(decode(path))
        return Place(root, kept)

    def find(self, path: bytes) -> Tuple[Optional[List[bytes]], List[bytes]]:
        """The root an absolute path is below, and the names that remain."""
        return self.find_names(split(path))

    def find_names(self, names: List[bytes]) -> Tuple[Optional[List[bytes]], List[bytes]]:
        for root in self._all:
            if root and names[: len(root)] == root:
                return root, names[len(root) :]
        return None, names


def _checked(text: object) -> bytes:
    if not isinstance(text, str) or not text:
        raise FileError("invalid", "A path must be a text that is not empty")
    try:
        path = encode(text)
    except UnicodeEncodeError:
        raise FileError("invalid", "A path holds characters that no file name can have") from None
    if b"\0" in path:
        raise FileError("invalid", "A path holds a NUL character")
    if len(path) > MAX_TEXT:
        raise FileError("invalid", "Path too long: %s" % shorten(text))
    return path


def escape(text: str) -> FileError:
    return FileError("path_escape", "Path leaves the sandbox's places: %s" % shorten(text))


def resolve(
    roots: Roots, place: Place, follow: bool = True, make_parents: bool = False
) -> Tuple[int, bytes]:
    """A descriptor (O_PATH) of the directory that holds the place, and the name in it.

    The name is "." when the place is a root itself. With `follow`, a link at the end has been
    followed; the name may still become a link at any time, so open it with O_NOFOLLOW.
    """
    walk = _Walk(roots, place)
    try:
        return walk.run(follow, make_parents)
    except OSError as error:
        walk.close()
        raise explain(error, place.text) from None
    except BaseException:
        walk.close()
        raise


def real_path(roots: Roots, place: Place) -> str:
    """The place without links on the way; its last name need not be there."""
    walk = _Walk(roots, place)
    try:
        _, name = walk.run(follow=True, make_parents=False)
        return decode(b"/" + b"/".join(walk.trail + ([] if name == b"." else [name])))
    except OSError as error:
        raise explain(error, place.text) from None
    finally:
        walk.close()


class _Walk:
    def __init__(self, roots: Roots, place: Place) -> None:
        self._roots = roots
        self._place = place
        self._root = place.root
        self._trail: List[bytes] = []  # real names, from the root to where we are
        self._pending = place.names[::-1]
        self._links = 0
        self._fd = -1

    @property
    def trail(self) -> List[bytes]:
        """The names of where it has come to."""
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
            # A file of the host that was given to the sandbox, alone.
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
        # The root comes from the sandbox's configuration: a link there is meant.
        path = b"/" + b"/".join(self._root)
        self._fd = os.open(path, DIRECTORY & ~os.O_NOFOLLOW)

    def _step_back(self) -> None:
        """Only links bring ".." here, and the way they came is walked again from the root."""
        if self._trail:
            self._pending.extend(self._trail[-2::-1])
        else:
            self._leave_root()
        self._restart()

    def _leave_root(self) -> None:
        """Fine, as long as the way leads to another of the places."""
        names = collapse(self._root[:-1] + self._pending[::-1])
        root, rest = (None, []) if names is None else self._roots.find_names(names)
        if root is None:
            raise escape(self._place.text)
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
            # A link is ENOTDIR or ELOOP; so is a file, and that one is final.
            if error.errno not in (errno.ENOTDIR, errno.ELOOP) or not self._follow(name):
                raise
        else:
            self.close()
            self._fd = inner
            self._trail.append(name)

    def _follow(self, name: bytes) -> bool:
        """Puts the target of a link in the place of its name; False when it is no link."""
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
                raise escape(self._place.text)
            self._root = root
            self._restart()
        self._pending.extend(reversed(names))
        return True


def _make_directory(name: bytes, parent: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        pass  # somebody else was faster; the walk looks again
