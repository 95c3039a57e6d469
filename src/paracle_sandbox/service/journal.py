"""The service's view of the audit log: requests, refusals, security events, and suspicion.

Every line of what a request did carries its key and its address. Security events of the library
(path escapes, broken protocols) come in over its logger and get the user they belong to. A user
who fails again and again, or tries what is not allowed, is flagged once a minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from ..audit import security_events
from ..audit.log import AuditLog, AuditQueue
from .middleware.caller import who

SUSPICIOUS_FAILURES = 20
SUSPICIOUS_EVENTS = 3
_WINDOW_SECONDS = 60.0


class Journal:
    """Writes the log, from a thread of its own. ``with_content`` keeps commands and code as well,
    never secrets."""

    def __init__(self, log: AuditLog, *, with_content: bool = False) -> None:
        self.log = log
        self.with_content = with_content
        self._queue = AuditQueue(log)
        self._suspicion = _Suspicion(self._queue.record)
        self._user_of: Callable[[str], str | None] = lambda sandbox_id: None
        self._handler = _Handler(self)
        security_events.LOGGER.addHandler(self._handler)

    def close(self) -> None:
        """Waits for the disk, though not for ever."""
        security_events.LOGGER.removeHandler(self._handler)
        if self._queue.end():
            self.log.close()  # else the thread still uses it

    @property
    def failures(self) -> int:
        """Lines that are not in the log, and will not be."""
        return self._queue.failures

    @property
    def is_written(self) -> bool:
        return self._queue.is_written

    async def written(self) -> None:
        """Wait for the lines of what is answered now, up to ten seconds."""
        await self._queue.wait_until_written()

    def know_users(self, user_of: Callable[[str], str | None]) -> None:
        """How to find the user of a sandbox."""
        self._user_of = user_of

    def record(self, event: str, **fields: object) -> None:
        self._queue.record(event, **{**who(), **fields})

    def execution(self, *, user: str, ok: bool, content: str | None = None, **f: object) -> None:
        """One program that ended, however it did."""
        fields = {"user": user, "outcome": "ok" if ok else "failed", **f}
        if self.with_content and content is not None:
            fields["content"] = content
        self.record("execution", **fields)
        if not ok:
            self._suspicion.failed(user)

    def refused(self, reason: str, *, user: str | None = None, **fields: object) -> None:
        self.record("refused", reason=reason, user=user, **fields)
        if user is not None:
            self._suspicion.failed(user)

    def security_event(self, event: str, sandbox_id: str | None, details: object) -> None:
        user = self._user_of(sandbox_id) if sandbox_id else None
        # What is wrong with a channel shows where all of its requests are read: it is nobody's.
        write = self._queue.record if event == "protocol" else self.record
        write("security", kind=event, user=user, sandbox_id=sandbox_id, details=details)
        if user is not None:
            self._suspicion.tried(user)


class _Handler(logging.Handler):
    """Takes the library's security events over."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if isinstance(event, str):
            found = vars(record)
            self._journal.security_event(event, found.get("sandbox_id"), found.get("details"))


class _Suspicion:
    """Counts what went wrong for each user in the current minute."""

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record
        self._since = time.monotonic()
        self._failures: Counter[str] = Counter()
        self._events: Counter[str] = Counter()

    def failed(self, user: str) -> None:
        self._count(self._failures, user, SUSPICIOUS_FAILURES, "repeated_failures")

    def tried(self, user: str) -> None:
        self._count(self._events, user, SUSPICIOUS_EVENTS, "repeated_security_events")

    def _count(self, counts: Counter[str], user: str, threshold: int, reason: str) -> None:
        if time.monotonic() - self._since > _WINDOW_SECONDS:
            self._since = time.monotonic()
            self._failures.clear()
            self._events.clear()
        counts[user] += 1
        if counts[user] == threshold:
            self._record("suspicious", user=user, reason=reason, count=threshold)
