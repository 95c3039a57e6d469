"""Open directories whose content is believed, because only this user can have written it.

Records in the state directory decide which processes are killed, and a template's code runs in the
spawner. Such a directory has a name that others can guess (``/tmp/paracle-sandbox-1000``) or that
the environment gives, so it is opened once, checked, and then used through the descriptor.

The spawner needs this too: standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from .platforms import user_id

_MOST_LINKS = 40
# The step that SandboxCreationError names when it is the state directory that is not ours.
STATE_DIRECTORY = "state directory"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ForeignDirectoryError(PermissionError):
    """The directory, or one above it, is not this user's alone; the message says whose it is."""


def open_own_directory(path: str, *, make: bool = False, parent: int | None = None) -> int:
    """Open a directory that only this user can have written to, and return its descriptor.

    ``parent`` is the descriptor of a directory that was checked before, for a name inside it.
    Raises ForeignDirectoryError, FileNotFoundError when it is not there and not to be made, and
    OSError for whatever else is in the way."""
    if not hasattr(os, "O_DIRECTORY"):
        raise OSError(errno.ENOTSUP, "this system opens no directories")
    if make:
        with contextlib.suppress(FileExistsError):  # whatever it is: it is looked at below
            if parent is None:
                os.makedirs(path, 0o700)
            else:
                os.mkdir(path, 0o700, dir_fd=parent)
    if parent is None:
        _refuse_replaceable(path)
    try:
        directory = os.open(path, _flags() | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            raise
        about = os.stat(path, dir_fd=parent, follow_symlinks=False)
        raise ForeignDirectoryError(errno.EPERM, _whose(path, about) or str(error)) from error
    why = _whose(path, os.fstat(directory))
    if why:
        os.close(directory)
        raise ForeignDirectoryError(errno.EPERM, why)
    return directory


def reopen_own_directory(path: str, known: tuple[int, int]) -> int | None:
    """The directory with this device and inode again, which was found to be ours alone before and
    still is: then it does not matter who could have replaced it. None when it is another."""
    try:
        directory = os.open(path, _flags() | os.O_NOFOLLOW)
    except OSError:
        return None
    about = os.fstat(directory)
    if (about.st_dev, about.st_ino) == known and is_ours_alone(about):
        return directory
    os.close(directory)
    return None


@contextlib.contextmanager
def own_subdirectory(path: str, name: str, *, make: bool = False) -> Iterator[int]:
    """A directory inside another, both checked as by ``open_own_directory``."""
    above = open_own_directory(path, make=make)
    try:
        directory = open_own_directory(name, make=make, parent=above)
    finally:
        os.close(above)
    try:
        yield directory
    finally:
        os.close(directory)


def open_trusted_directory(path: str) -> int:
    """Return a descriptor of a directory that only this user, or root, can have written to; it may
    be a link, and a group that has no other member may write to it. Raises as above."""
    _refuse_replaceable(path)
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and not _is_trusted(found.st_uid):
        raise ForeignDirectoryError(errno.EPERM, f"{path} is a link of {_user(found.st_uid)}")
    try:
        directory = os.open(path, _flags())
    except PermissionError:  # what cannot be read may be another's all the same
        if why := _why_not_trusted(path, os.stat(path)):
            raise ForeignDirectoryError(errno.EPERM, why) from None
        raise
    why = _why_not_trusted(path, os.fstat(directory))
    if why:
        os.close(directory)
        raise ForeignDirectoryError(errno.EPERM, why)
    return directory


def refuse_foreign_parents(path: str) -> None:
    """Refuse to make this directory, and those above it that are missing, where another user could
    replace them. Raises ForeignDirectoryError."""
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    _refuse_replaceable(os.path.join(there, "new") if there != os.path.abspath(path) else path)


def make_trusted_directory(path: str, variable: str) -> None:
    """For files that are believed, as keys are: make it, or see that nobody else can have written
    to it. ``variable`` names another. Raises SandboxError for one of others, OSError else.

    Windows tells no owner and no mode. There a directory below the user's own is the user's."""
    from ..errors import SandboxError

    if not hasattr(os, "O_DIRECTORY"):
        os.makedirs(path, exist_ok=True)
        return
    try:
        refuse_foreign_parents(path)
        os.makedirs(path, 0o700, exist_ok=True)
        os.close(open_trusted_directory(path))
    except ForeignDirectoryError as error:
        raise SandboxError(
            f"The directory {path} is not used: {error.strerror}. What is in it would be believed. "
            f"Set {variable} to a directory of this user."
        ) from error


def is_ours_alone(directory: os.stat_result) -> bool:
    """Say whether only we can have put there what is in it; for a link, no."""
    return not _whose("", directory)


def _flags() -> int:
    return os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def _whose(path: str, about: os.stat_result) -> str:
    """Say why this is not ours alone; empty when it is."""
    if stat.S_ISLNK(about.st_mode):
        return f"{path} is a link"
    if not stat.S_ISDIR(about.st_mode):
        return f"{path} is not a directory"
    if about.st_uid != user_id():
        return f"{path} belongs to {_user(about.st_uid)}, and this is {_user(user_id())}"
    if about.st_mode & stat.S_IWOTH:
        return f"{path} can be written by every user"
    if about.st_mode & stat.S_IWGRP:
        return f"{path} can be written by its group"
    return ""


def _why_not_trusted(path: str, about: os.stat_result) -> str:
    """Like ``_whose``, but root and a group of this user alone may have written to it."""
    if about.st_uid == 0 and not about.st_mode & stat.S_IWOTH:
        return ""
    if about.st_uid == user_id() and about.st_mode & _WRITABLE_BY_OTHERS == stat.S_IWGRP:
        return "" if _is_private_group(about.st_gid, about.st_uid) else _whose(path, about)
    return _whose(path, about)


def _refuse_replaceable(path: str) -> None:
    """Check the directories above: a user who can rename one can put another in its place. Links
    are followed as the kernel follows them; the last component is not looked at."""
    current, links = "/", 0
    _check_parent(current)
    waiting = [part for part in os.path.dirname(os.path.abspath(path)).split("/") if part][::-1]
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            current = os.path.dirname(current)
            continue
        below = os.path.join(current, part)
        about = os.lstat(below)
        if not stat.S_ISLNK(about.st_mode):
            current = below
            _check_parent(current, about)
            continue
        links += 1
        if links > _MOST_LINKS or not _is_trusted(about.st_uid):
            raise ForeignDirectoryError(errno.EPERM, f"{below} is a link of {_user(about.st_uid)}")
        target = os.readlink(below)
        if target.startswith("/"):
            current = "/"
        waiting += target.split("/")[::-1]


def _check_parent(path: str, about: os.stat_result | None = None) -> None:
    about = about or os.lstat(path)
    if not _is_trusted(about.st_uid):
        raise ForeignDirectoryError(
            errno.EPERM, f"{path}, above it, belongs to {_user(about.st_uid)}"
        )
    writable = about.st_mode & _WRITABLE_BY_OTHERS
    if not writable or about.st_mode & stat.S_ISVTX:
        return
    if writable == stat.S_IWGRP and _is_private_group(about.st_gid, about.st_uid):
        return
    who = "every user" if writable & stat.S_IWOTH else "its group"
    raise ForeignDirectoryError(errno.EPERM, f"{path}, above it, can be written by {who}")


def _is_trusted(uid: int) -> bool:
    """Root may do what it likes anyway. In a user namespace, what is not mapped is the system's."""
    return uid in (0, user_id()) or (uid == _unmapped() and _has_partial_mapping())


def _unmapped() -> int:
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534


def _has_partial_mapping() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != ["0", "0", "4294967295"]
    except OSError:
        return False


def _is_private_group(gid: int, uid: int) -> bool:
    """Say whether a group is the one that many systems give to each user, with no other member."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        import pwd

        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except (ImportError, KeyError):
        return f"user {uid}"
