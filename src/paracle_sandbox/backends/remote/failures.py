"""Turns what a service says went wrong into the same error that it was there.

Names are looked up in a table and nowhere else: an answer cannot choose what is raised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import (
    BackendUnavailableError,
    DockerConnectionError,
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
)

_KINDS: dict[str, type[SandboxError]] = {
    kind.__name__: kind
    for kind in (
        BackendUnavailableError, DockerConnectionError, ResourceLimitError, SandboxCleanupError,
        SandboxConflictError, SandboxCreationError, SandboxError, SandboxExecutionError,
        SandboxFileDecodeError, SandboxFileError, SandboxFileExistsError, SandboxFileNotFoundError,
        SandboxIsADirectoryError, SandboxLimitError, SandboxNotADirectoryError,
        SandboxNotFoundError, SandboxPathError, SandboxPermissionError, SandboxTimeoutError,
    )
}  # fmt: skip
# The service's own refusals.
_KINDS |= {
    "Conflict": SandboxConflictError,
    "NotFound": SandboxNotFoundError,
    "TooMany": SandboxLimitError,
    "Unavailable": SandboxLimitError,
}
_BY_STATUS: dict[int, type[SandboxError]] = {
    404: SandboxNotFoundError,
    409: SandboxConflictError,
    429: SandboxLimitError,
    503: BackendUnavailableError,
}
# What a proxy says that knows nothing of us.
_UNTOLD = {404: "Sandbox not found", 503: "Service unavailable: nobody answers behind the proxy"}
_DETAILS = (
    "step", "resource_type", "limit", "usage", "timeout_seconds", "stdout", "stderr",
    "errno", "strerror", "filename",
)  # fmt: skip
_MESSAGE_LENGTH = 2000


def remote_error(status: int, body: object, sandbox_id: str | None) -> SandboxError:
    """Return the error for an answer of 400 and above, whatever is in it."""
    told: Mapping[str, Any] = body if isinstance(body, dict) else {}
    said = told.get("error")
    if not isinstance(said, str) or not said:
        said = _UNTOLD.get(status, f"API error ({status})")
    message = said[:_MESSAGE_LENGTH]
    if status == 401:
        return BackendUnavailableError(
            "Authentication failed: Invalid API key. Set SANDBOX_API_KEY to one of the service's.",
            sandbox_id,
        )
    if 300 <= status < 400:
        return BackendUnavailableError(
            f"The sandbox service answers with a redirect ({status}), which is not followed: the "
            "key would go with it. Set SANDBOX_API_URL to the address it leads to.",
            sandbox_id,
        )
    kind = _KINDS.get(str(told.get("error_type"))) or _BY_STATUS.get(status, SandboxExecutionError)
    error = kind(message, sandbox_id)
    details = told.get("details")
    if not isinstance(details, dict):
        return error
    for name in _DETAILS:
        if hasattr(error, name) and isinstance(details.get(name), str | int | float):
            setattr(error, name, details[name])
    return error
