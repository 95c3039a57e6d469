"""Turns errors into results that a model can act on: what happened, and what to try."""

from __future__ import annotations

from ..errors import (
    BackendUnavailableError,
    ResourceLimitError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxFileDecodeError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxLimitError,
    SandboxPathError,
    SandboxTimeoutError,
    StoppedError,
)
from .result import ToolResult, shorten

# The kind of failure that an error is. The first class that fits decides.
_KINDS: tuple[tuple[type[SandboxError], str], ...] = (
    (SandboxTimeoutError, "timeout"),
    (ResourceLimitError, "limit"),
    (SandboxFileError, "file"),
    (BackendUnavailableError, "unavailable"),
    (SandboxLimitError, "unavailable"),
    (SandboxCreationError, "container"),
    (SandboxExecutionError, "container"),
)

_ADVICE: tuple[tuple[type[SandboxError], str], ...] = (
    (
        SandboxTimeoutError,
        "Do less at once, run it in the background, or ask for a longer timeout.",
    ),
    (SandboxPathError, "Use a path relative to the working directory, or below /tmp."),
    (SandboxFileDecodeError, "The file is not text: read it with a program that knows its format."),
    (SandboxFileNotFoundError, "List the directory to see what is there."),
    (BackendUnavailableError, "No code can be run here; tell the user."),
    (SandboxLimitError, "Wait until another sandbox has ended."),
)
_LIMITS = {
    "memory": "Work on less data at once.",
    "disk": "Remove files that are no longer needed.",
    "pids": "Start fewer processes or threads.",
    "output": "Print less, or write to a file and read parts of it.",
}


def classify(error: BaseException) -> str:
    """Return the kind of a failure: timeout, limit, file, container, unavailable or other."""
    return next((kind for cause, kind in _KINDS if isinstance(error, cause)), "other")


def explain_error(error: SandboxError) -> ToolResult:
    """Return the result that describes an error to a model."""
    lines = [error.message, _find_advice(error)]
    if isinstance(error, StoppedError):
        if error.stdout:
            lines.append(f"What it had printed:\n{shorten(error.stdout)}")
        if error.stderr:
            lines.append(f"[stderr]: {shorten(error.stderr)}")
    text = "\n".join(line for line in lines if line)
    data = {"error_type": type(error).__name__, "kind": classify(error)}
    return ToolResult(text, is_error=True, data=data)


def _find_advice(error: SandboxError) -> str:
    if isinstance(error, ResourceLimitError):
        return _LIMITS.get(error.resource_type or "", "")
    return next((advice for cause, advice in _ADVICE if isinstance(error, cause)), "")
