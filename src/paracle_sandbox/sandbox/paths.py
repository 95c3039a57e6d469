"""Paths inside a sandbox, as far as their text can be judged on the host.

The guest judges again, with the links that only it can see.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from ..errors import SandboxPathError

if TYPE_CHECKING:
    from ..config import SandboxConfig

# What ``read_only_filesystem=False`` makes writable, on every backend.
EXTRA_WRITABLE = ("/home", "/opt", "/srv", "/mnt")

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


def own_places(config: SandboxConfig) -> tuple[str, ...]:
    """The directories that file operations may touch: what is the sandbox's own, or was given to
    it. The working directory is the first."""
    volumes = (target.removesuffix(":rw").removesuffix(":ro") for target in config.volumes.values())
    writable = () if config.read_only_filesystem else EXTRA_WRITABLE
    return tuple(dict.fromkeys((config.working_dir, "/tmp", *volumes, *writable)))


def checked_path(path: str, places: Sequence[str], sandbox_id: str) -> str:
    """The path, unchanged. Raises SandboxPathError when it is none, or leaves the places: a
    relative one the first of them, the working directory."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise SandboxPathError(f"Not a path: {path!r}", sandbox_id, path=path)
    full = posixpath.normpath(posixpath.join(places[0], path))
    roots = places if path.startswith("/") else places[:1]
    if not any(full == root or full.startswith(root + "/") for root in roots):
        raise SandboxPathError(
            f"The path leaves the sandbox's own directories ({', '.join(places)}): {path!r}",
            sandbox_id, path=path,
        )  # fmt: skip
    return path
