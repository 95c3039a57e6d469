"""Paths inside a sandbox, as far as their text can be judged on the host.

The guest judges again, with the links that only it can see.
"""

from __future__ import annotations

import os
import posixpath
from pathlib import PurePath

from .errors import SandboxPathError

AnyPath = str | os.PathLike[str]


def path_text(path: AnyPath, sandbox_id: str) -> str:
    """The path as text. Raises TypeError for what is none, SandboxPathError for an empty one."""
    # A path of Windows has the steps that are meant, but not the slashes.
    text = path.as_posix() if isinstance(path, PurePath) else os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path must be a str or a Path, not {type(path).__name__}")
    if not text:
        raise SandboxPathError("The path is empty", sandbox_id)
    return text


def checked_path(path: str, working_dir: str, sandbox_id: str) -> str:
    """The path, unchanged. Raises SandboxPathError when it is none, or leaves the working
    directory and /tmp."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise SandboxPathError(f"Not a path: {path!r}", sandbox_id, path=path)
    full = posixpath.normpath(posixpath.join(working_dir, path))
    roots = (working_dir, "/tmp") if path.startswith("/") else (working_dir,)
    if not any(full == root or full.startswith(root + "/") for root in roots):
        raise SandboxPathError(
            f"The path leaves the working directory: {path!r}", sandbox_id, path=path
        )
    return path
