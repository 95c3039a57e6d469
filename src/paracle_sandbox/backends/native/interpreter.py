"""The interpreter that runs inside: which one it is, and where it lives."""

from __future__ import annotations

import functools
import os
import sys

from ...errors import BackendUnavailableError, SandboxCreationError
from .spawner_process import default_python


def version_of(python: str) -> str:
    return _about(python)[0]


def refuse_hidden(python: str, working_dir: str) -> None:
    """A sandbox has some directories for itself: what the host has there is not to be seen, and
    without its library an interpreter does not get far. Raises SandboxCreationError."""
    home = _about(python)[1]
    for place in ("/tmp", working_dir):
        if f"{home}/".startswith(f"{place}/"):
            raise SandboxCreationError(
                f"The interpreter is in {home}, and a sandbox has a {place} of its own. Use "
                "another working directory, or name an interpreter elsewhere in PARACLE_PYTHON.",
                step="interpreter",
            )


@functools.cache
def _about(python: str) -> tuple[str, str]:
    """Its version, and the directory that its library is in. Raises BackendUnavailableError."""
    if os.path.realpath(python) == default_python() and sys.implementation.name == "cpython":
        return f"CPython-{sys.version.split()[0]}", sys.base_prefix
    import subprocess

    code = (
        "import platform, sys\n"
        "print(platform.python_implementation() + '-' + platform.python_version())\n"
        "print(sys.base_prefix)"
    )
    command = [python, "-I", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _does_not_run(python, error.strerror or str(error)) from error
    said = done.stdout.splitlines()
    if done.returncode != 0 or len(said) != 2:
        raise _does_not_run(python, done.stderr.strip()[:200] or "it is no Python")
    return said[0], said[1]


def _does_not_run(python: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"PARACLE_PYTHON does not run: {python}: {reason}. Name a Python that this user can "
        "execute, or none.",
        step="start",
    )
