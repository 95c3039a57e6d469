"""Security events: one structured log record each, on the logger ``paracle_sandbox.audit``."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("paracle_sandbox.audit")


def security_event(event: str, *, sandbox_id: str | None = None, **details: object) -> None:
    """Record that something inside tried what it may not. The record carries ``event``,
    ``sandbox_id`` and ``details`` as attributes, for handlers that keep or forward them."""
    # %r keeps hostile text on one line: a path may not forge a second record.
    LOGGER.warning(
        "security event %s in sandbox %s: %r",
        event,
        sandbox_id,
        details,
        extra={"event": event, "sandbox_id": sandbox_id, "details": details},
    )
