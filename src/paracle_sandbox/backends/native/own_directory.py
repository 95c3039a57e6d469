"""The state directory, because records decide what gets killed, and that of templates, because they
are code: both may be nobody else's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ...errors import BackendUnavailableError
from ...host.own_directory import (
    STATE_DIRECTORY,
    ForeignDirectoryError,
    open_own_directory,
    open_trusted_directory,
    refuse_foreign_parents,
)
from .descriptors import is_shortage, no_descriptor


def open_state_directory(path: str, *, make: bool = False) -> int:
    """A descriptor of it. Raises BackendUnavailableError for one of others, FileNotFoundError when
    it is not there and not to be made, and OSError when there is no descriptor to be had."""
    try:
        return open_own_directory(path, make=make)
    except ForeignDirectoryError as error:
        raise BackendUnavailableError(
            f"The state directory {path} is not this user's alone: {error.strerror}. Nothing in it "
            "was believed or touched. Remove it, or set PARACLE_STATE_DIR to another.",
            step=STATE_DIRECTORY,
        ) from error
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise BackendUnavailableError(
            f"The state directory cannot be used: {error}. Set PARACLE_STATE_DIR to another.",
            step=STATE_DIRECTORY,
        ) from error


def require_own_directory(path: str) -> None:
    """Make it if need be. Raises BackendUnavailableError for one of others, or a link."""
    try:
        os.close(open_state_directory(path, make=True))
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor() from error
        raise BackendUnavailableError(
            f"The state directory cannot be used: {error}. Set PARACLE_STATE_DIR to another.",
            step=STATE_DIRECTORY,
        ) from error


def require_trusted_template(path: str) -> None:
    """Its modules are imported by the spawner. Raises BackendUnavailableError for one that others
    can write to."""
    try:
        os.close(open_trusted_directory(path))
    except FileNotFoundError:  # it was replaced just now
        return
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor() from error
        raise _untrusted("template", path, error) from error


def require_trusted_templates(path: str) -> None:
    """Before anything in the directory of templates is looked at. Raises BackendUnavailableError
    for one that others can write to. One that is not there, or that cannot be opened, is met again
    by whoever wants something of it."""
    try:
        with open_templates(path):
            pass
    except OSError as error:
        if is_shortage(error):
            raise no_descriptor() from error


@contextlib.contextmanager
def open_templates(path: str, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory of templates. Raises BackendUnavailableError for one that
    others can write to, FileNotFoundError when it is not there and not to be made, and OSError for
    whatever else is in the way."""
    try:
        if make:
            refuse_foreign_parents(path)
            os.makedirs(path, 0o755, exist_ok=True)
        elif not os.path.lexists(path):  # then it does not matter who could make it
            raise FileNotFoundError(path)
        directory = open_trusted_directory(path)
    except ForeignDirectoryError as error:
        raise _untrusted("directory of templates", path, error) from error
    try:
        yield directory
    finally:
        os.close(directory)


def _untrusted(what: str, path: str, error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"The {what} {path} is not used: {error.strerror or error}. Its code would run with "
        "this user's rights. Remove it, or set PARACLE_DATA_DIR to a directory of this user.",
        step="template",
    )
