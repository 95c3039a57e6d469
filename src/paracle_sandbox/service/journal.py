"""The service's audit log: what requests did, refusals, security events, and suspicious users.

Every line about a request has its key and its address. Security events of the library (path
escapes, broken protocols) arrive over its logger, and are written with the user they belong to. A
user with many failures or security events is flagged once a minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from ..audit import security_events
from ..audit.log import AuditLog, AuditQueue
from .middleware.request_context import describe_sender

SUSPICIOUS_FAILURES = 20
SUSPICIOUS_EVENTS = 3
_WINDOW_SECONDS = 60.0


class Journal:
    """Writes the log in a thread of its own. ``with_content`` adds commands and code, never
    secrets."""

    def __init__(self, log: AuditLog, *, with_content: bool = False) -> None:
        self.log = log
        self.with_content = with_content
        self._queue = AuditQueue(log)
        self._suspicion = _Suspicion(self._queue.record)
        self._user_of: Callable[[str], str | None] = lambda sandbox_id: None
        self._handler = _Handler(self)
        security_events.LOGGER.addHandler(self._handler)

    def close(self) -> None:
        """Wait for the disk, for a limited time, and close the log."""
        security_events.LOGGER.removeHandler(self._handler)
        if self._queue.end():
            self.log.close()  # else the thread still uses it

    @property
    def failures(self) -> int:
        """How many lines are lost."""
        return self._queue.failures

    @property
    def is_written(self) -> bool:
        return self._queue.is_written

    async def written(self) -> None:
        """Wait until the lines so far are written, up to ten seconds."""
        await self._queue.wait_until_written()

    def know_users(self, user_of: Callable[[str], str | None]) -> None:
        """Set the function that finds the user of a sandbox."""
        self._user_of = user_of

    def record(self, event: str, **fields: object) -> None:
        self._queue.record(event, **{**describe_sender(), **fields})

    def record_execution(
        self, *, user: str, ok: bool, content: str | None = None, **f: object
    ) -> None:
        """Record a program that ended, however it did."""
        fields = {"user": user, "outcome": "ok" if ok else "failed", **f}
        if self.with_content and content is not None:
            fields["content"] = content
        self.record("execution", **fields)
        if not ok:
            self._suspicion.count_failure(user)

    def record_refusal(self, reason: str, *, user: str | None = None, **fields: object) -> None:
        self.record("refused", reason=reason, user=user, **fields)
        if user is not None:
            self._suspicion.count_failure(user)

    def security_event(self, event: str, sandbox_id: str | None, details: object) -> None:
        user = self._user_of(sandbox_id) if sandbox_id else None
        # A broken protocol shows in the channel's reader, whose context is an unrelated request.
        write = self._queue.record if event == "protocol" else self.record
        write("security", kind=event, user=user, sandbox_id=sandbox_id, details=details)
        if user is not None:
            self._suspicion.count_event(user)


class _Handler(logging.Handler):
    """Passes the library's security events to the journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if isinstance(event, str):
            found = vars(record)
            self._journal.security_event(event, found.get("sandbox_id"), found.get("details"))


class _Suspicion:
    """Counts failures and security events of each user in the current minute."""

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record
        self._since = time.monotonic()
        self._failures: Counter[str] = Counter()
        self._events: Counter[str] = Counter()

    def count_failure(self, user: str) -> None:
        self._count(self._failures, user, SUSPICIOUS_FAILURES, "repeated_failures")

    def count_event(self, user: str) -> None:
        self._count(self._events, user, SUSPICIOUS_EVENTS, "repeated_security_events")

    def _count(self, counts: Counter[str], user: str, threshold: int, reason: str) -> None:
        if time.monotonic() - self._since > _WINDOW_SECONDS:
            self._since = time.monotonic()
            self._failures.clear()
            self._events.clear()
        counts[user] += 1
        if counts[user] == threshold:
            self._record("suspicious", user=user, reason=reason, count=threshold)
