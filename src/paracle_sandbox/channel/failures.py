"""What an ERROR frame of the guest becomes on the host: a table from code to typed error."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import (
    ResourceLimitError,
    SandboxError,
    SandboxExecutionError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxPathError,
)

_MESSAGE_LENGTH = 500
_RUNS = ("exec", "python")


def _not_found(path: str, message: str, sandbox_id: str) -> SandboxError:
    return SandboxFileNotFoundError(f"File not found: {path}", sandbox_id)


def _path_escape(path: str, message: str, sandbox_id: str) -> SandboxError:
    return SandboxPathError(f"The path leaves the working directory: {path}", sandbox_id, path=path)


def _no_directory(path: str, message: str, sandbox_id: str) -> SandboxError:
    return SandboxFileNotFoundError(f"The directory of the target is not there: {path}", sandbox_id)


def _no_space(path: str, message: str, sandbox_id: str) -> SandboxError:
    return ResourceLimitError(
        f"Disk limit exceeded: no space left for {path}", sandbox_id, resource_type="disk"
    )


def _no_process(path: str, message: str, sandbox_id: str) -> SandboxError:
    return ResourceLimitError(
        f"Process limit exceeded: {message}", sandbox_id, resource_type="pids"
    )


def _not_started(path: str, message: str, sandbox_id: str) -> SandboxError:
    return SandboxExecutionError(f"{path}: {message}" if path else message, sandbox_id)


def _other(path: str, message: str, sandbox_id: str) -> SandboxError:
    says_where = message.startswith("/") or ": /" in message
    return SandboxFileError(
        f"{path}: {message}" if path and not says_where else message, sandbox_id
    )


_BY_CODE: dict[str, Callable[[str, str, str], SandboxError]] = {
    "not_found": _not_found,
    "path_escape": _path_escape,
    "no_space": _no_space,
    "target_not_found": _no_directory,
    "target_path_escape": _path_escape,
}


def failure(answer: Mapping[str, Any], op: Mapping[str, Any], sandbox_id: str) -> SandboxError:
    """The error for an ERROR payload, which is hostile text: cut short, never looked up."""
    code, message = answer.get("code"), answer.get("message")
    runs = op.get("op") in _RUNS
    other = _not_started if runs else _other
    make = _BY_CODE.get(code, other) if isinstance(code, str) else other
    if runs and answer.get("errno") == errno.EAGAIN:
        make = _no_process
    text = message[:_MESSAGE_LENGTH] if isinstance(message, str) else "the guest gave no reason"
    return make(_subject(op, str(code)), text, sandbox_id)


def _subject(op: Mapping[str, Any], code: str) -> str:
    """The path that an error is about, as the host asked for it."""
    names: tuple[str, ...] = ("cwd",) if op.get("op") in _RUNS else ("path", "source")
    if code.startswith("target_"):
        names = ("target",)
    return next((str(op[name]) for name in names if op.get(name) is not None), "")
