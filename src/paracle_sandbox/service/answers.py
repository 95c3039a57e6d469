"""Answers to requests that may be sent again: kept in a file, so that they outlive the service.

A row is written before its request runs, and completed with the answer. One that was never
completed belongs to a service that ended meanwhile: nobody knows how far the request came, and
that is what whoever sends it again is told.
"""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

MAX_ANSWERS = 10_000
MAX_KEPT = 64 << 20
_DAY = 86_400.0
_TABLE = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, body_hash BLOB NOT NULL, made REAL NOT NULL,
    status INTEGER, headers TEXT, body BLOB, size INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (made);
"""

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Answer:
    """``status`` is None when nobody knows how the request ended."""

    body_hash: bytes
    status: int | None
    headers: Headers
    body: bytes


class Answers:
    """Below a directory; in memory only without one."""

    def __init__(self, directory: Path | None) -> None:
        path = ":memory:"
        if directory is not None:
            file = directory / "answers.db"
            file.touch(mode=0o600)
            path = str(file)
        self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None)
        # A process that is killed loses nothing by this; a machine that is, the last moment.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_TABLE)

    def close(self) -> None:
        self._db.close()

    def find(self, key: bytes) -> Answer | None:
        row = self._db.execute(
            "SELECT body_hash, status, headers, body FROM answers WHERE key = ? AND made > ?",
            (key, time.time() - _DAY),
        ).fetchone()
        if row is None:
            return None
        pairs = json.loads(row[2] or "[]")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        return Answer(row[0], row[1], headers, row[3] or b"")

    def begin(self, key: bytes, body_hash: bytes) -> None:
        """Raises sqlite3.Error when it cannot be written."""
        self._db.execute(
            "INSERT OR REPLACE INTO answers (key, body_hash, made) VALUES (?, ?, ?)",
            (key, body_hash, time.time()),
        )

    def complete(self, key: bytes, status: int, headers: Headers, body: bytes) -> None:
        """Raises sqlite3.Error when it cannot be written."""
        text = json.dumps([(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers])
        self._db.execute(
            "UPDATE answers SET status = ?, headers = ?, body = ?, size = ? WHERE key = ?",
            (status, text, body, len(body), key),
        )
        self._forget_some()

    def drop(self, key: bytes) -> None:
        self._db.execute("DELETE FROM answers WHERE key = ?", (key,))

    def _forget_some(self) -> None:
        """Those of yesterday, and the oldest of too many or too large ones."""
        self._db.execute("DELETE FROM answers WHERE made <= ?", (time.time() - _DAY,))
        count, size = self._db.execute("SELECT count(*), sum(size) FROM answers").fetchone()
        if count <= MAX_ANSWERS and size <= MAX_KEPT:
            return
        # Somewhat more than needed, so that this is not done for each request from now on.
        rows = self._db.execute("SELECT key, size FROM answers ORDER BY made").fetchall()
        for key, one in rows:
            if count <= MAX_ANSWERS * 0.9 and size <= MAX_KEPT * 0.9:
                break
            self.drop(key)
            count, size = count - 1, size - one
