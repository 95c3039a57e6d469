"""Turn an ERROR frame of the guest into a typed error of the host, by a table of codes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import (
    ResourceLimitError,
    SandboxError,
    SandboxExecutionError,
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    SandboxPathError,
    SandboxPermissionError,
)

_MESSAGE_LENGTH = 500
_RUNS = ("exec", "python")
_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


class _GuestError(NamedTuple):
    """The content of an ERROR frame after it was checked, and the path that the host asked for."""

    path: str
    message: str
    number: int | None
    sandbox_id: str

    @property
    def text(self) -> str:
        says_where = self.message.startswith("/") or ": /" in self.message
        return f"{self.path}: {self.message}" if self.path and not says_where else self.message


def _not_found(error: _GuestError) -> SandboxError:
    return _file_error(
        SandboxFileNotFoundError, error, errno.ENOENT, f"File not found: {error.path}"
    )


def _no_directory(error: _GuestError) -> SandboxError:
    text = f"The directory of the target does not exist: {error.path}. Create it first."
    return _file_error(SandboxFileNotFoundError, error, errno.ENOENT, text)


def _path_escape(error: _GuestError) -> SandboxError:
    return SandboxPathError(
        f"The path leaves the sandbox's own directories: {error.path}",
        error.sandbox_id, path=error.path,
    )  # fmt: skip


def _exists(error: _GuestError) -> SandboxError:
    return _file_error(SandboxFileExistsError, error, errno.EEXIST)


def _is_directory(error: _GuestError) -> SandboxError:
    return _file_error(SandboxIsADirectoryError, error, errno.EISDIR)


def _not_directory(error: _GuestError) -> SandboxError:
    return _file_error(SandboxNotADirectoryError, error, errno.ENOTDIR)


def _permission(error: _GuestError) -> SandboxError:
    number = error.number if error.number in _PERMISSION else errno.EACCES
    return _file_error(SandboxPermissionError, error, number)


def _no_space(error: _GuestError) -> SandboxError:
    return ResourceLimitError(
        f"Disk limit exceeded: no space left for {error.path}",
        error.sandbox_id, resource_type="disk",
    )  # fmt: skip


def _no_process(error: _GuestError) -> SandboxError:
    return ResourceLimitError(
        f"Process limit exceeded: {error.message}", error.sandbox_id, resource_type="pids"
    )


def _not_started(error: _GuestError) -> SandboxError:
    text = f"{error.path}: {error.message}" if error.path else error.message
    return SandboxExecutionError(text, error.sandbox_id)


def _other_file_error(error: _GuestError) -> SandboxError:
    return _file_error(SandboxFileError, error, error.number)


def _file_error(
    kind: type[SandboxFileError], error: _GuestError, number: int | None, text: str | None = None
) -> SandboxError:
    return kind(text or error.text, error.sandbox_id, errno=number, filename=error.path or None)


_BY_CODE: dict[str, Callable[[_GuestError], SandboxError]] = {
    "not_found": _not_found,
    "path_escape": _path_escape,
    "exists": _exists,
    "is_directory": _is_directory,
    "not_directory": _not_directory,
    "permission": _permission,
    "no_space": _no_space,
    "target_not_found": _no_directory,
    "target_path_escape": _path_escape,
}
# When a program was not started, only errors about its working directory are file errors.
_RUN_CODES = ("not_found", "path_escape", "not_directory", "no_space")


def to_sandbox_error(
    response: Mapping[str, Any], op: Mapping[str, Any], sandbox_id: str
) -> SandboxError:
    """Build the error for the payload of an ERROR frame that answers ``op``.

    The payload is hostile: its message is cut short, and its code selects a row of the table or
    nothing.
    """
    code, message, number = response.get("code"), response.get("message"), response.get("errno")
    runs = op.get("op") in _RUNS
    other: Callable[[_GuestError], SandboxError] = _not_started if runs else _other_file_error
    make = other
    if isinstance(code, str) and (not runs or code in _RUN_CODES):
        make = _BY_CODE.get(code, other)
    if runs and number == errno.EAGAIN:
        make = _no_process
    text = message[:_MESSAGE_LENGTH] if isinstance(message, str) else "the guest gave no reason"
    known = type(number) is int and number in errno.errorcode
    return make(_GuestError(_subject(op, str(code)), text, number if known else None, sandbox_id))


def _subject(op: Mapping[str, Any], code: str) -> str:
    """Return the path that the error is about, as the host wrote it in its request."""
    names: tuple[str, ...] = ("cwd",) if op.get("op") in _RUNS else ("path", "source")
    if code.startswith("target_"):
        names = ("target",)
    return next((str(op[name]) for name in names if op.get(name) is not None), "")
