"""Logs security events, one structured record each, on the logger ``paracle_sandbox.audit``."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("paracle_sandbox.audit")


def security_event(event: str, *, sandbox_id: str | None = None, **details: object) -> None:
    """Record that code inside a sandbox tried something that is not allowed. The record has the
    attributes ``event``, ``sandbox_id`` and ``details``, for handlers that keep or forward it."""
    # %r keeps hostile text on one line, so that a path cannot forge a second record.
    LOGGER.warning(
        "security event %s in sandbox %s: %r",
        event,
        sandbox_id,
        details,
        extra={"event": event, "sandbox_id": sandbox_id, "details": details},
    )
