"""List the changes below a directory since the last listing.

The host saves the files of a workspace after each program. To make this cheap for files that did
not change, the guest remembers a fingerprint of each of them: its change time, which no program can
set, and other values that differ if the file was replaced.
"""

import stat
from typing import Any, Dict, List, Optional

from .dirwalk import SLICE
from .job import Message, Wire, Work, read_number
from .ops import ESCAPED, EVENT_BYTES, describe_entry, send_event, walk_below
from .paths import FileError, Roots, decode

# A path and its number take some 150 bytes of the sandbox's memory.
MAX_REMEMBERED = 100_000


class _LastListing:
    """The fingerprints of the last listing. The host names it by its token."""

    def __init__(self) -> None:
        self.token: Optional[str] = None
        self.fingerprints: Dict[bytes, int] = {}
        self.count = 0


# This is state of the process, which is the guest of one sandbox.
_last_listing = _LastListing()


def list_changes(request: Message, wire: Wire, roots: Roots) -> Work:
    """List the files and directories that are new, changed or gone since an earlier listing.

    The host names that listing by its token. If it was not the last one, the response says "all",
    and holds all of them.
    """
    since: Any = request.get("since")
    is_known = since is not None and since == _last_listing.token
    most = min(read_number(request, "most", MAX_REMEMBERED), MAX_REMEMBERED)
    before = _last_listing.fingerprints if is_known else {}
    walk = walk_below(roots, roots.locate(request.get("path")))
    fingerprints: Dict[bytes, int] = {}
    batch: List[Message] = []
    seen = size = 0
    try:
        for found in walk:
            seen += 1
            if seen % SLICE == 0:
                yield True
            fingerprint = _fingerprint(found.status)
            if fingerprint is None:
                continue
            if len(fingerprints) >= most:
                raise FileError(
                    "too_large",
                    "There are more than %d files and directories, which is the limit" % most,
                )
            fingerprints[found.path] = fingerprint
            if before.get(found.path) == fingerprint:
                continue
            weight = ESCAPED * (len(found.path) + len(found.name)) + 200
            if len(batch) >= SLICE or (batch and size + weight > EVENT_BYTES):
                yield from send_event(wire, {"entries": batch})
                batch, size = [], 0
            batch.append(describe_entry(found.name, decode(found.path), found.status))
            size += weight
        if batch:
            yield from send_event(wire, {"entries": batch})
        gone = [path for path in before if path not in fingerprints]
        for start in range(0, len(gone), SLICE // 8):  # a path has up to 4,096 bytes
            part = [decode(path) for path in gone[start : start + SLICE // 8]]
            yield from send_event(wire, {"gone": part})
    finally:
        walk.close()
    _last_listing.count += 1
    _last_listing.token, _last_listing.fingerprints = str(_last_listing.count), fingerprints
    return {"token": _last_listing.token, "all": not is_known, "skipped": walk.skipped}


def _fingerprint(status: Any) -> Optional[int]:
    """Return a number that differs after a change; None for entries that the host does not save."""
    if stat.S_ISREG(status.st_mode):
        times = (status.st_ctime_ns, status.st_mtime_ns)
        return hash((times, status.st_ino, status.st_size, status.st_mode))
    if stat.S_ISDIR(status.st_mode):
        return hash(status.st_mode)  # its entries are listed on their own
    return None
