"""What an ERROR frame of the guest becomes on the host: a table from code to typed error."""

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


class _Told(NamedTuple):
    """What is known of a failure: the path that the host asked for, and the guest's words."""

    path: str
    message: str
    number: int | None
    sandbox_id: str

    @property
    def text(self) -> str:
        says_where = self.message.startswith("/") or ": /" in self.message
        return f"{self.path}: {self.message}" if self.path and not says_where else self.message


def _not_found(told: _Told) -> SandboxError:
    return _file(SandboxFileNotFoundError, told, errno.ENOENT, f"File not found: {told.path}")


def _no_directory(told: _Told) -> SandboxError:
    text = f"The directory of the target is not there: {told.path}"
    return _file(SandboxFileNotFoundError, told, errno.ENOENT, text)


def _path_escape(told: _Told) -> SandboxError:
    return SandboxPathError(
        f"The path leaves the sandbox's own directories: {told.path}",
        told.sandbox_id, path=told.path,
    )  # fmt: skip


def _exists(told: _Told) -> SandboxError:
    return _file(SandboxFileExistsError, told, errno.EEXIST)


def _is_directory(told: _Told) -> SandboxError:
    return _file(SandboxIsADirectoryError, told, errno.EISDIR)


def _not_directory(told: _Told) -> SandboxError:
    return _file(SandboxNotADirectoryError, told, errno.ENOTDIR)


def _permission(told: _Told) -> SandboxError:
    number = told.number if told.number in _PERMISSION else errno.EACCES
    return _file(SandboxPermissionError, told, number)


def _no_space(told: _Told) -> SandboxError:
    return ResourceLimitError(
        f"Disk limit exceeded: no space left for {told.path}",
        told.sandbox_id, resource_type="disk",
    )  # fmt: skip


def _no_process(told: _Told) -> SandboxError:
    return ResourceLimitError(
        f"Process limit exceeded: {told.message}", told.sandbox_id, resource_type="pids"
    )


def _not_started(told: _Told) -> SandboxError:
    text = f"{told.path}: {told.message}" if told.path else told.message
    return SandboxExecutionError(text, told.sandbox_id)


def _other(told: _Told) -> SandboxError:
    return _file(SandboxFileError, told, told.number)


def _file(
    kind: type[SandboxFileError], told: _Told, number: int | None, text: str | None = None
) -> SandboxError:
    return kind(text or told.text, told.sandbox_id, errno=number, filename=told.path or None)


_BY_CODE: dict[str, Callable[[_Told], SandboxError]] = {
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
# Of a program that was not started: what its directory is, not what the program may do.
_RUN_CODES = ("not_found", "path_escape", "not_directory", "no_space")


def failure(answer: Mapping[str, Any], op: Mapping[str, Any], sandbox_id: str) -> SandboxError:
    """The error for an ERROR payload, which is hostile text: cut short, never looked up."""
    code, message, number = answer.get("code"), answer.get("message"), answer.get("errno")
    runs = op.get("op") in _RUNS
    other: Callable[[_Told], SandboxError] = _not_started if runs else _other
    make = other
    if isinstance(code, str) and (not runs or code in _RUN_CODES):
        make = _BY_CODE.get(code, other)
    if runs and number == errno.EAGAIN:
        make = _no_process
    text = message[:_MESSAGE_LENGTH] if isinstance(message, str) else "the guest gave no reason"
    known = type(number) is int and number in errno.errorcode
    return make(_Told(_subject(op, str(code)), text, number if known else None, sandbox_id))


def _subject(op: Mapping[str, Any], code: str) -> str:
    """The path that an error is about, as the host asked for it."""
    names: tuple[str, ...] = ("cwd",) if op.get("op") in _RUNS else ("path", "source")
    if code.startswith("target_"):
        names = ("target",)
    return next((str(op[name]) for name in names if op.get(name) is not None), "")
