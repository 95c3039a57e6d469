"""Numbers that one process holds at a time: a file for each, locked as long as its holder lives.

The lock is the kernel's: it cannot outlive the process, and a recycled pid cannot fake it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

_MOST = 1024


def claim_number(directory: int) -> tuple[int, int]:
    """The lowest free number, and the descriptor that holds it."""
    for number in range(_MOST):
        lock = os.open(str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        # The process that held the name before may have unlinked it between our open and our lock.
        if os.fstat(lock).st_nlink:
            return number, lock
        os.close(lock)
    raise OSError(f"{_MOST} spawners run already")


def release_number(directory: int, number: int, lock: int) -> None:
    """Unlink first, unlock after: a newcomer that opened the old name sees that it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(number), dir_fd=directory)
    os.close(lock)
