"""The errors of the package, by the module name that the specified systems have for them."""

from __future__ import annotations

from .errors import (
    BackendUnavailableError,
    DockerConnectionError,
    InvalidValueError,
    ResourceLimitError,
    SandboxCleanupError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxFileDecodeError,
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxLimitError,
    SandboxNotADirectoryError,
    SandboxNotFoundError,
    SandboxPathError,
    SandboxPermissionError,
    SandboxTimeoutError,
    StoppedError,
)

# What one of those systems calls it.
SandboxResourceError = ResourceLimitError

__all__ = [
    "BackendUnavailableError",
    "DockerConnectionError",
    "InvalidValueError",
    "ResourceLimitError",
    "SandboxCleanupError",
    "SandboxConflictError",
    "SandboxCreationError",
    "SandboxError",
    "SandboxExecutionError",
    "SandboxFileDecodeError",
    "SandboxFileError",
    "SandboxFileExistsError",
    "SandboxFileNotFoundError",
    "SandboxIsADirectoryError",
    "SandboxLimitError",
    "SandboxNotADirectoryError",
    "SandboxNotFoundError",
    "SandboxPathError",
    "SandboxPermissionError",
    "SandboxResourceError",
    "SandboxTimeoutError",
    "StoppedError",
]
