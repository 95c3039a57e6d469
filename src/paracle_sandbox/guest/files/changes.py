"""What has changed below a directory since somebody last asked.

The host keeps the files of a workspace after each program. So that this costs it nothing for files
that stayed as they are, the guest remembers how each of them looked: by its change time, which no
program can set, and by what else would differ had it been replaced.
"""

import stat
from typing import Any, Dict, List, Optional

from .dirwalk import SLICE
from .job import Message, Wire, Work, number_of
from .ops import ESCAPED, EVENT_BYTES, announce, describe_entry, walk_below
from .paths import FileError, Roots, decode

# A path and its number take some 150 bytes of the sandbox's memory.
MAX_KNOWN = 100_000


class _Last:
    """How everything looked when the last listing ended: the host knows it by the token."""

    def __init__(self) -> None:
        self.token: Optional[str] = None
        self.looks: Dict[bytes, int] = {}
        self.count = 0


# Of this process, which is the guest of one sandbox.
_last = _Last()


def list_changes(request: Message, wire: Wire, roots: Roots) -> Work:
    """Entries of files and directories that are new or changed since the listing that the host
    names, and the paths of those that are gone; of all, if that was not the last one."""
    since: Any = request.get("since")
    is_known = since is not None and since == _last.token
    most = min(number_of(request, "most", MAX_KNOWN), MAX_KNOWN)
    before = _last.looks if is_known else {}
    walk = walk_below(roots, roots.locate(request.get("path")))
    looks: Dict[bytes, int] = {}
    batch: List[Message] = []
    seen = size = 0
    try:
        for found in walk:
            seen += 1
            if seen % SLICE == 0:
                yield True
            look = _look(found.status)
            if look is None:
                continue
            if len(looks) >= most:
                raise FileError("too_large", "there are more than %d files and directories" % most)
            looks[found.path] = look
            if before.get(found.path) == look:
                continue
            weight = ESCAPED * (len(found.path) + len(found.name)) + 200
            if len(batch) >= SLICE or (batch and size + weight > EVENT_BYTES):
                yield from announce(wire, {"entries": batch})
                batch, size = [], 0
            batch.append(describe_entry(found.name, decode(found.path), found.status))
            size += weight
        if batch:
            yield from announce(wire, {"entries": batch})
        gone = [path for path in before if path not in looks]
        for start in range(0, len(gone), SLICE // 8):  # a path has up to 4,096 bytes
            part = [decode(path) for path in gone[start : start + SLICE // 8]]
            yield from announce(wire, {"gone": part})
    finally:
        walk.close()
    _last.count += 1
    _last.token, _last.looks = str(_last.count), looks
    return {"token": _last.token, "all": not is_known, "skipped": walk.skipped}


def _look(status: Any) -> Optional[int]:
    """A number that differs when it changed; None for what is not kept, such as links."""
    if stat.S_ISREG(status.st_mode):
        times = (status.st_ctime_ns, status.st_mtime_ns)
        return hash((times, status.st_ino, status.st_size, status.st_mode))
    if stat.S_ISDIR(status.st_mode):
        return hash(status.st_mode)  # what is in it speaks for itself
    return None
