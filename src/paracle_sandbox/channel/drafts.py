"""Notes of what is being copied to the host's disk, for what a killed process leaves of it.

A copy arrives under a hidden name and is moved to its place when it is whole. Whoever is killed
meanwhile leaves the draft, wherever it is. So its place is noted in the state directory before, and
whoever sweeps up after dead processes finds it there.

A note is a link that leads nowhere: it is there whole or not at all. It reads
"owner of the copy:path of the draft".
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..guest.descent import remove_tree
from ..guest.trees import temporary_name
from ..owner import Owner, is_ours_alone

# What `temporary_name` makes: files that are being written have such names until they are whole.
DRAFT_NAME = re.compile(r"\.paracle-[0-9a-f]{16}\Z")
_PARENT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Drafts:
    """Those of one state directory; None notes nothing."""

    def __init__(self, state_dir: str | None = None) -> None:
        self._notes = os.path.join(state_dir, "drafts") if state_dir else None

    @contextlib.contextmanager
    def noted(self, *folders: Path) -> Iterator[bytes]:
        """The name for a draft that will be in one of the folders, which are absolute. Where a
        note is refused, it is done without."""
        name = temporary_name()
        drafts = [os.path.join(folder, os.fsdecode(name)) for folder in folders]
        notes = [self._note(draft) for draft in drafts]
        try:
            yield name
        finally:
            for draft, note in zip(drafts, notes, strict=True):
                if note and not os.path.lexists(draft):  # else somebody has to try again
                    with contextlib.suppress(OSError):
                        os.unlink(note)

    def _note(self, draft: str) -> str | None:
        if self._notes is None:
            return None
        note = os.path.join(self._notes, os.urandom(8).hex())
        with contextlib.suppress(OSError):
            for directory in (os.path.dirname(self._notes), self._notes):
                os.makedirs(directory, 0o700, exist_ok=True)
            if is_ours_alone(os.lstat(self._notes)):
                os.symlink(f"{Owner.of(os.getpid())}:{draft}", note)
                return note
        return None

    @property
    def noted_any(self) -> bool:
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
                os.unlink(note)

    def _all(self) -> list[tuple[str, str]]:
        if self._notes is None:
            return []
        found = []
        with contextlib.suppress(OSError):
            if not is_ours_alone(os.lstat(self._notes)):
                return []  # others could have drafts of ours removed
            for name in os.listdir(self._notes):
                note = os.path.join(self._notes, name)
                with contextlib.suppress(OSError):
                    found.append((note, os.readlink(note)))
        return found


def _remove(path: str) -> None:
    """What is there under the name of a draft, if it is ours. Gone is success."""
    folder, name = os.path.split(path)
    if not DRAFT_NAME.match(name):
        return
    try:
        parent = os.open(folder, _PARENT)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        found = os.lstat(name, dir_fd=parent)
        if found.st_uid != os.geteuid():
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
