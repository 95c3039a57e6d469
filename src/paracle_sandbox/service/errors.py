"""What a request can fail with, and how each failure is told over HTTP.

    ServiceFault
    ├── BadRequest      400  the request makes no sense
    ├── NotFound        404  not there, or not this caller's: the two answer alike
    ├── Forbidden       403  only an admin key may
    ├── Conflict        409  it exists already
    ├── TooLarge        413
    ├── OutOfRange      416  nothing of the file lies there
    ├── Unprocessable   422  it can be read, but one of its values is not to be had
    ├── TooMany         429  a quota; Retry-After says when to come back
    ├── Unavailable     503  not now; Retry-After
    └── NotKept         507  done inside, but the service cannot keep it

Failures are classified as well (``recovery``), so that a caller knows without reading text
whether to try again, and whether something was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..config import InvalidConfigError
from ..errors import (
    BackendUnavailableError,
    ResourceLimitError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxPathError,
    SandboxTimeoutError,
)
from .recovery import classify, is_refused

RETRY_SECONDS = 5
INTERNAL = "Internal server error: it is in the service's log, and not a mistake of this request"
_REFUSALS = (400, 403, 413, 422, 429, 503)
_CARRIED = (
    "step", "resource_type", "limit", "usage", "timeout_seconds", "stdout", "stderr",
    "errno", "strerror", "filename",
)  # fmt: skip


class ServiceFault(Exception):
    """A request that is refused."""

    status = 400
    kind = "bad_input"
    hint: str | None = None

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}
        self.noted = False  # whether a line of the log tells of it already


class BadRequest(ServiceFault):
    """It makes no sense."""


class NotFound(ServiceFault):
    """There is no such thing for this caller."""

    status = 404
    kind = "not_found"


class Forbidden(ServiceFault):
    """Only an admin key may."""

    status = 403
    kind = "denied"


class Conflict(ServiceFault):
    """It exists already."""

    status = 409
    kind = "conflict"


class TooLarge(ServiceFault):
    """More than the service takes."""

    status = 413


class OutOfRange(ServiceFault):
    """Nothing of the file lies there; the answer says how large it is."""

    status = 416

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.headers["content-range"] = f"bytes */{size}"


class Unprocessable(ServiceFault):
    """A value that cannot be had."""

    status = 422


class TooMany(ServiceFault):
    """A quota of the user."""

    status = 429
    kind = "quota"


class Unavailable(ServiceFault):
    """Not now."""

    status = 503
    kind = "busy"


class NotKept(ServiceFault):
    """The service's own disk is full, or broken."""

    status = 507
    kind = "storage"


# The first that fits: narrower ones stand first.
_STATUS: tuple[tuple[type[SandboxError], int], ...] = (
    (SandboxPathError, 400),
    (SandboxFileNotFoundError, 404),
    (SandboxFileError, 409),
    (SandboxNotFoundError, 404),
    (SandboxConflictError, 409),
    (SandboxLimitError, 503),
    (BackendUnavailableError, 503),
    (SandboxCreationError, 503),
    (SandboxTimeoutError, 504),
    (ResourceLimitError, 507),
    (SandboxExecutionError, 502),
    (SandboxError, 500),
)


def status_of(error: SandboxError) -> int:
    if is_refused(error):
        return 400
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def is_refusal(error: ServiceFault | SandboxError) -> bool:
    """Whether it belongs into the log as one: something was asked for that nobody may have, or not
    this much of it. What is not there, or in the way, is none; ways out of the working directory
    are security events of the library."""
    if isinstance(error, ServiceFault):
        return error.status in _REFUSALS
    return status_of(error) == 400 and not isinstance(error, SandboxPathError)


def in_one_line(
    error: ValidationError | InvalidConfigError, names: Mapping[str, str] | None = None
) -> str:
    """What is wrong with a value, without the value: it may be a secret. ``names`` are those of
    the request, where they are not the same."""
    if isinstance(error, InvalidConfigError):
        first: Mapping[str, Any] = error.errors()[0]
    else:
        first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    where = (names or {}).get(where, where)
    return f"{where}: {plainly(first['msg'])}" if where else plainly(first["msg"])


def plainly(message: str) -> str:
    """What pydantic says, without its own words for it."""
    return message.removeprefix("Value error, ")


def fault_body(error: ServiceFault | SandboxError) -> dict[str, Any]:
    """The JSON of a failure: the same fields for every one."""
    if isinstance(error, ServiceFault):
        body = {"error": str(error), "error_type": type(error).__name__, "kind": error.kind}
        return body if error.hint is None else {**body, "hint": error.hint}
    details = {name: getattr(error, name) for name in _CARRIED if getattr(error, name, None)}
    failure = classify(error)
    return {
        "error": error.message,
        "error_type": type(error).__name__,
        "kind": failure.kind,
        "retryable": failure.retryable,
        "state_lost": failure.state_lost,
        "details": details,
    }
