"""Whether there may be a firewall table of ours: known at the cost of a look at one small file.

Whoever makes the table says so in the file that the makers and removers of it lock, before; whoever
removes it clears that, after. So what a killed owner left is found by the next process, and one
that has nothing to do with networks need not ask nftables.
"""

from __future__ import annotations

import os

TABLE_LOCK = "/run/paracle-sandbox-network.lock"
_MARK = b"table\n"


def may_be_there() -> bool:
    try:
        return os.stat(TABLE_LOCK).st_size > 0
    except OSError:
        return False


def set_mark(lock: int) -> None:
    os.pwrite(lock, _MARK, 0)


def clear_mark(lock: int) -> None:
    os.ftruncate(lock, 0)
