"""Do without what some systems lack on which the library can be a client: macOS has no O_PATH,
Windows has no user ids, no file locks of Unix and no descriptors of directories.

Sandboxes themselves are on Linux. The remote and the Docker client work from anywhere, so nothing
here may fail while the package is imported.
"""

from __future__ import annotations

import os
import sys

SIGKILL = 9
SIGPIPE = 13
_NAMES = {"darwin": "macOS", "win32": "Windows"}


def system_name() -> str:
    return _NAMES.get(sys.platform, sys.platform)


def is_part_of_python(module: str | None) -> bool:
    """Say whether a module comes with Python, if only with that of another system: then no
    installation brings it."""
    return (module or "").partition(".")[0] in sys.stdlib_module_names


def user_id() -> int:
    """The effective uid, or -1 on a system that has none."""
    return os.geteuid() if hasattr(os, "geteuid") else -1


def has_directory_descriptors() -> bool:
    """Say whether files can be reached from an open directory, so that no link can lead
    elsewhere."""
    return hasattr(os, "O_DIRECTORY") and os.open in os.supports_dir_fd


def open_flags(*names: str) -> int:
    """Combine those flags for os.open that this system has."""
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


def without_engine() -> str:
    """Say what can be set here instead of an engine that is not there."""
    if sys.platform == "linux":
        return "set SANDBOX_MODE=native"
    return "use a service on Linux: SANDBOX_MODE=remote with SANDBOX_API_URL"


def lock_file(fd: int, *, wait: bool = True, shared: bool = False) -> None:
    """Take the lock of an open file, for us alone unless ``shared``; no-op where the system has
    none. Raises BlockingIOError when another process has it and it is not to be waited for."""
    try:
        import fcntl
    except ImportError:
        return
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(fd, kind if wait else kind | fcntl.LOCK_NB)


def unlock_file(fd: int) -> None:
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(fd, fcntl.LOCK_UN)
