"""What is done with sandboxes, one structured log record each, on ``paracle_sandbox.operations``.

A record has ``event``, ``sandbox_id`` and ``details`` as attributes, as security events have. What
was asked for and done or refused is INFO, what was stopped or broke WARNING. No record holds code,
a command, or what a program printed. The logger prints nothing by itself: what goes wrong is raised
as well.
"""

from __future__ import annotations

import logging

from ..errors import ResourceLimitError, SandboxError, SandboxTimeoutError

LOGGER = logging.getLogger("paracle_sandbox.operations")
LOGGER.addHandler(logging.NullHandler())


def log_operation(event: str, sandbox_id: str, **details: object) -> None:
    """Record that something was done."""
    _log(logging.INFO, event, sandbox_id, details)


def log_failure(
    event: str,
    sandbox_id: str,
    error: BaseException,
    *,
    level: int = logging.WARNING,
    **details: object,
) -> None:
    """Record that something was stopped or went wrong, and why."""
    if not LOGGER.isEnabledFor(level):
        return
    details["error_type"] = type(error).__name__
    if isinstance(error, SandboxError):
        details["error"] = error.message[:500]
    if isinstance(error, ResourceLimitError):
        details["resource"] = error.resource_type
    _log(level, event, sandbox_id, details)


def log_refusal(sandbox_id: str, error: SandboxError) -> None:
    """Record an operation that ended with an error, such as a file that is not there: it is the
    caller's business, and no warning."""
    log_failure("operation_failed", sandbox_id, error, level=logging.INFO)


def log_end(sandbox_id: str, exit_code: int, seconds: float, error: BaseException | None) -> None:
    """Record how a command ended: ``executed``, or stopped by its ``timeout`` or a ``limit``, or
    ``not_executed`` to its end for another reason."""
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
    # %r keeps hostile text on one line: it may not forge a second record.
    LOGGER.log(
        level,
        "%s: sandbox %s: %r",
        event,
        sandbox_id,
        details,
        extra={"event": event, "sandbox_id": sandbox_id, "details": details},
    )
