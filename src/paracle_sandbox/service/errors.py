"""Failures of requests: their classes, their classification, and how each is told over HTTP.

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

Every failure is classified as well, so that a caller knows without reading text whether to try
again, and whether something was lost. Trying again is safe only where nothing can have happened
yet: a sandbox that was never made, a read that did not come back. The service never repeats a
program that may have run in part. ``PathHider`` keeps paths of the service's machine out of
answers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from ..settings import Settings
from .middleware.request_context import SENDER

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
        self.noted = False  # whether the log has a line for it already


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
    """It is more than the service takes."""

    status = 413


class OutOfRange(ServiceFault):
    """Nothing of the file lies in that range; the answer says how large it is."""

    status = 416

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.headers["content-range"] = f"bytes */{size}"


class Unprocessable(ServiceFault):
    """One of its values cannot be had."""

    status = 422


class TooMany(ServiceFault):
    """A quota of the user is used up."""

    status = 429
    kind = "quota"


class Unavailable(ServiceFault):
    """The service cannot do it now."""

    status = 503
    kind = "busy"


class NotKept(ServiceFault):
    """The service's own disk is full, or broken."""

    status = 507
    kind = "storage"


@dataclass(frozen=True)
class Failure:
    """How a failure is classified. ``retryable``: the same request may succeed later and does no
    harm. ``state_lost``: processes and files in /tmp are gone."""

    kind: str
    retryable: bool = False
    state_lost: bool = False


# The first class that fits counts: narrower ones stand first.
_KINDS: tuple[tuple[type[SandboxError], Failure], ...] = (
    (SandboxTimeoutError, Failure("timeout")),
    (ResourceLimitError, Failure("limit")),
    (SandboxLimitError, Failure("busy", retryable=True)),
    (SandboxNotFoundError, Failure("not_found")),
    (SandboxConflictError, Failure("conflict")),
    (BackendUnavailableError, Failure("engine_down", retryable=True)),
    (SandboxCreationError, Failure("creation", retryable=True)),
    (SandboxExecutionError, Failure("sandbox_lost", state_lost=True)),
    (SandboxFileError, Failure("file")),
)


# A refusal at one of these steps is a fault of the configuration, and permanent.
_CONFIG_STEPS = (None, "volumes", "interpreter", "image")


def is_refused(error: SandboxError) -> bool:
    """Whether the service will never make such a sandbox."""
    return type(error) is SandboxCreationError and error.step in _CONFIG_STEPS


def classify(error: SandboxError) -> Failure:
    if is_refused(error):
        return Failure("creation")
    return next((f for kind, f in _KINDS if isinstance(error, kind)), Failure("internal"))


# The first class that fits counts: narrower ones stand first.
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
    """Whether the log has a line for it: the request wanted something that is not allowed, or too
    much. A thing that is missing or exists already is no refusal; a path out of the working
    directory is a security event of the library."""
    if isinstance(error, ServiceFault):
        return error.status in _REFUSALS
    return status_of(error) == 400 and not isinstance(error, SandboxPathError)


def first_fault(
    error: ValidationError | InvalidConfigError, names: Mapping[str, str] | None = None
) -> str:
    """Say what is wrong with a value, without the value, which may be a secret. ``names`` has the
    request's names of fields, where they differ."""
    if isinstance(error, InvalidConfigError):
        first: Mapping[str, Any] = error.errors()[0]
    else:
        first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    where = (names or {}).get(where, where)
    return f"{where}: {strip_prefix(first['msg'])}" if where else strip_prefix(first["msg"])


def strip_prefix(message: str) -> str:
    """Remove pydantic's prefix from a message."""
    return message.removeprefix("Value error, ")


def fault_body(error: ServiceFault | SandboxError) -> dict[str, Any]:
    """Return the JSON of a failure, which has the same fields for every one."""
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


HIDDEN_PATH = "(a path of the service's machine)"


class PathHider:
    """Replaces paths of the service's machine in error messages. They are there for the operator:
    an admin key and the log see them."""

    def __init__(self, settings: Settings) -> None:
        given = (settings.service_dir, settings.state_dir, settings.data_dir)
        self._paths = _pattern([*given, sys.prefix, sys.base_prefix])

    def __call__(self, text: str) -> str:
        """Return the text as the sender of the current request may read it."""
        sender = SENDER.get()
        if sender is not None and sender.is_admin:
            return text
        return self._paths.sub(HIDDEN_PATH, text)


def _pattern(roots: Iterable[str]) -> re.Pattern[str]:
    named = {root.rstrip("/") for root in roots if root.strip("/").count("/")}
    found = "|".join(re.escape(root) for root in sorted(named, key=len, reverse=True))
    if not found:
        return re.compile(r"(?!)")
    inside = r"(?:/(?:[^\s'\",;:)]*[^\s'\",;:).])?)?"
    return re.compile(rf"(?:{found}){inside}(?![\w/-])")
