"""Receive a tree in a hidden directory, and move it to its target once it is whole.

If the target exists, the hidden directory is inside of it: the target may be a mount, and only
within a mount is a move a rename. Otherwise it is beside the target. The target does not change
before `settle`.
"""

import os
from typing import Iterator, Optional

from .archive import TreeWriter, temporary_name
from .dirwalk import merge, remove_tree
from .paths import DIRECTORY


class Staging:
    """A hidden directory and the writer that fills it.

    It takes over the descriptor ``parent``. ``name`` is the target directory in it, and ``draft``
    the name of the hidden one.
    """

    def __init__(
        self,
        parent: int,
        name: bytes,
        *,
        draft: Optional[bytes] = None,
        links: bool,
        mode_mask: int,
        max_bytes: Optional[int] = None,
        max_entries: Optional[int] = None,
    ) -> None:
        self._parent = parent
        self._name = name
        self._target = -1
        self._stage = -1
        self._stage_name = draft or temporary_name()
        try:
            self._open()
        except OSError:
            self._close()
            raise
        self.writer = TreeWriter(
            self._stage,
            links=links,
            mode_mask=mode_mask,
            max_bytes=max_bytes,
            max_entries=max_entries,
        )

    def settle(self) -> Iterator[None]:
        """Move the tree to its target; yields after each slice of work.

        Raises TreeError if the tree is cut off.
        """
        self.writer.finish()
        if self._target >= 0:
            yield from merge(self._stage, self._target)
            yield from remove_tree(self._target, self._stage_name)
        else:
            os.fchmod(self._stage, 0o755)
            os.rename(
                self._stage_name, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent
            )
        self._close()

    def discard(self) -> None:
        """Remove the hidden directory. After `settle` this does nothing."""
        if self._stage < 0:
            return
        self.writer.close()
        try:
            for _ in remove_tree(self._holder(), self._stage_name):
                pass
        except OSError:
            pass  # the caller reports the error that led here
        self._close()

    def _open(self) -> None:
        try:
            self._target = os.open(self._name, DIRECTORY, dir_fd=self._parent)
        except FileNotFoundError:
            pass
        os.mkdir(self._stage_name, 0o700, dir_fd=self._holder())
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._stage = os.open(self._stage_name, flags, dir_fd=self._holder())

    def _holder(self) -> int:
        return self._target if self._target >= 0 else self._parent

    def _close(self) -> None:
        for fd in (self._parent, self._target, self._stage):
            if fd >= 0:
                os.close(fd)
        self._parent = self._target = self._stage = -1
