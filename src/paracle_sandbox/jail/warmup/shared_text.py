"""The interpreter's code, mapped once for all processes that come of this one.

A fork copies the page table of memory that was written to, and leaves out that of files: a child
finds each stretch of the interpreter's code by a fault of its own, and a sandbox is two children.
Of a mapping with one written page the kernel copies everything that was used of it. So a byte of
each large one is written as it is. What nobody has used yet stays out: whatever is mapped is copied
with each process, and let go of at its end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LARGE = 256 << 10
_USED = ("python", "libpython", "libc.", "libc-")


def share_code() -> None:
    """For the sake of speed: all works without, and where the kernel refuses."""
    with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:
        for start, _ in list(_large_mappings()):
            os.pwrite(memory.fileno(), os.pread(memory.fileno(), 1, start), start)


def _large_mappings() -> Iterator[tuple[int, int]]:
    """What of the interpreter and the C library is not to be written to. Not how a file begins,
    with names that nobody looks up any more."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, flags, offset, _, _, *path = line.split(maxsplit=5)
            start, end = (int(number, 16) for number in span.split("-"))
            used = any(os.path.basename(one).startswith(_USED) for one in path)
            reads = flags == "r-xp" or (flags == "r--p" and int(offset, 16) > 0)
            if used and reads and end - start >= _LARGE:
                yield start, end
