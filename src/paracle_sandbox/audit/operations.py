"""Logs operations on sandboxes, one structured record each, on ``paracle_sandbox.operations``.

A record has the attributes ``event``, ``sandbox_id`` and ``details``, as security events have. The
level is INFO for a request that was done or refused, and WARNING for an operation that was stopped
or broke. No record holds code, a command or output. The logger prints nothing by default, because
failures are raised as well.
"""

from __future__ import annotations

import logging

from ..errors import ResourceLimitError, SandboxError, SandboxTimeoutError

LOGGER = logging.getLogger("paracle_sandbox.operations")
LOGGER.addHandler(logging.NullHandler())


def log_operation(event: str, sandbox_id: str, **details: object) -> None:
    """Record an operation that was done."""
    _log(logging.INFO, event, sandbox_id, details)


def log_failure(
    event: str,
    sandbox_id: str,
    error: BaseException,
    *,
    level: int = logging.WARNING,
    **details: object,
) -> None:
    """Record an operation that was stopped or failed, and why."""
    if not LOGGER.isEnabledFor(level):
        return
    details["error_type"] = type(error).__name__
    if isinstance(error, SandboxError):
        details["error"] = error.message[:500]
    if isinstance(error, ResourceLimitError):
        details["resource"] = error.resource_type
    _log(level, event, sandbox_id, details)


def log_refusal(sandbox_id: str, error: SandboxError) -> None:
    """Record an operation that ended with an error of the caller, such as a missing file. It is not
    a warning."""
    log_failure("operation_failed", sandbox_id, error, level=logging.INFO)


def log_end(sandbox_id: str, exit_code: int, seconds: float, error: BaseException | None) -> None:
    """Record how a command ended. The event is ``executed``, ``timeout``, ``limit``, or
    ``not_executed`` if something else ended it."""
    if error is None:
        if LOGGER.isEnabledFor(logging.INFO):
            log_operation("executed", sandbox_id, exit_code=exit_code, seconds=round(seconds, 6))
        return
    event = "not_executed"
    if isinstance(error, SandboxTimeoutError):
        event = "timeout"
    elif isinstance(error, ResourceLimitError):
        event = "limit"
    log_failure(event, sandbox_id, error, seconds=round(seconds, 6))


def _log(level: int, event: str, sandbox_id: str, details: dict[str, object]) -> None:
    # %r keeps hostile text on one line, so that it cannot forge a second record.
    LOGGER.log(
        level,
        "%s: sandbox %s: %r",
        event,
        sandbox_id,
        details,
        extra={"event": event, "sandbox_id": sandbox_id, "details": details},
    )
