"""Note what is being copied to the host's disk, so that the draft of a killed process is removed.

A copy arrives under a hidden name and is moved to its place when it is whole. A process that is
killed meanwhile leaves the draft. So the place of the draft is noted in the state directory first,
and a sweep after dead processes finds it there.

A note is a link that leads nowhere: it is there whole or not at all. It reads
"owner of the copy:path of the draft".
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ...guest.files.archive import temporary_name
from ...guest.files.dirwalk import remove_tree
from ...host.own_directory import own_subdirectory
from ...host.platforms import open_flags, user_id
from .owner import Owner

# What `temporary_name` makes: files that are being written have such names until they are whole.
DRAFT_NAME = re.compile(r"\.paracle-[0-9a-f]{16}\Z")
# The same as one step of a path, between its slashes.
DRAFT_STEP = re.compile(r"/\.paracle-[0-9a-f]{16}/")
_PARENT = os.O_RDONLY | open_flags("O_PATH", "O_DIRECTORY", "O_CLOEXEC")


class Drafts:
    """Keeps the notes of one state directory; without one it keeps none."""

    def __init__(self, state_dir: str | None = None) -> None:
        self._state_dir = state_dir

    @contextlib.contextmanager
    def noting(self, *folders: Path) -> Iterator[bytes]:
        """Yield the name for a draft that will be in one of the folders, which are absolute, and
        note it meanwhile. A copy goes on without a note where none can be made."""
        name = temporary_name()
        drafts = [os.path.join(folder, os.fsdecode(name)) for folder in folders]
        notes = [self._note(draft) for draft in drafts]
        try:
            yield name
        finally:
            for draft, note in zip(drafts, notes, strict=True):
                if note and not os.path.lexists(draft):  # else somebody has to try again
                    self._forget(note)

    def _note(self, draft: str) -> str | None:
        note = os.urandom(8).hex()
        try:
            with self._notes(make=True) as notes:
                os.symlink(f"{Owner.of(os.getpid())}:{draft}", note, dir_fd=notes)
        except OSError:
            return None
        return note

    def _forget(self, note: str) -> None:
        with contextlib.suppress(OSError), self._notes() as notes:
            os.unlink(note, dir_fd=notes)

    def _notes(self, *, make: bool = False) -> contextlib.AbstractContextManager[int]:
        """The directory of the notes. Not one of others, who could have files of ours removed.
        Raises OSError."""
        if self._state_dir is None:
            raise FileNotFoundError(errno.ENOENT, "no notes are kept")
        return own_subdirectory(self._state_dir, "drafts", make=make)

    @property
    def has_notes(self) -> bool:
        return bool(self._all())

    def sweep(self) -> None:
        """Remove the drafts of processes that are dead, as far as that can be told."""
        for note, text in self._all():
            owner, _, draft = text.partition(":")
            known = Owner.parse(owner)
            if known is None or known.is_alive:
                continue
            with contextlib.suppress(OSError):
                _remove(draft)
                self._forget(note)

    def _all(self) -> list[tuple[str, str]]:
        found = []
        with contextlib.suppress(OSError), self._notes() as notes:
            for name in os.listdir(notes):
                with contextlib.suppress(OSError):
                    found.append((name, os.readlink(name, dir_fd=notes)))
        return found


def _remove(path: str) -> None:
    """Remove what has the name of a draft, if it is ours. Gone is success."""
    folder, name = os.path.split(path)
    if not DRAFT_NAME.match(name):
        return
    try:
        parent = os.open(folder, _PARENT)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        found = os.lstat(name, dir_fd=parent)
        if found.st_uid != user_id():
            return
        if stat.S_ISDIR(found.st_mode):
            for _ in remove_tree(parent, os.fsencode(name)):
                pass
        else:
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    finally:
        os.close(parent)
