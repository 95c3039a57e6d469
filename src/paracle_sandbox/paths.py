"""Paths inside a sandbox, as far as their text can be judged on the host.

The guest judges again, with the links that only it can see.
"""

from __future__ import annotations

import posixpath

from .errors import SandboxPathError


def checked_path(path: str, working_dir: str, sandbox_id: str) -> str:
    """The path, unchanged. Raises SandboxPathError when it is none, or leaves the working
    directory and /tmp."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise SandboxPathError(f"Not a path: {path!r}", sandbox_id)
    full = posixpath.normpath(posixpath.join(working_dir, path))
    roots = (working_dir, "/tmp") if path.startswith("/") else (working_dir,)
    if not any(full == root or full.startswith(root + "/") for root in roots):
        raise SandboxPathError(f"The path leaves the working directory: {path!r}", sandbox_id)
    return path
