"""Names of sandboxes: 26 characters that sort by time, or one that the caller chose."""

from __future__ import annotations

import os
import re
import time

from .errors import SandboxCreationError

_CHOSEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_sandbox_id() -> str:
    """A ULID: 48 bits of time in milliseconds, then 80 random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return "".join([_BASE32[number >> shift & 31] for shift in range(125, -1, -5)])


def check_sandbox_id(sandbox_id: str) -> None:
    """An id becomes part of file and cgroup names: refuse what could leave its directory."""
    if not isinstance(sandbox_id, str):
        raise TypeError(f"a sandbox id must be a str, not {type(sandbox_id).__name__}")
    if not _CHOSEN.match(sandbox_id):
        raise SandboxCreationError(
            f"Not a sandbox id: {sandbox_id[:80]!r}; use up to 64 letters, digits, - and _"
        )
