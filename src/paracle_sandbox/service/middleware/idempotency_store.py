"""Stores answers to requests that may be sent again, in a file that outlives the service.

A row is written before its request runs, and completed with the answer. A row without an answer is
left by a service that ended meanwhile. It is unknown how far that request came, and the client that
sends it again is told so.

Each owner (a key, and the user it acts for) may have so many answers, of so many bytes; its oldest
answers make room for its next. Only where all owners together have too much, those with most lose
some. So the requests of one owner do not drive out the answers of another.

Answers are kept for a day by a clock that is set when the service starts and does not jump.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MINUTE = 60.0
_TABLE = """
CREATE TABLE IF NOT EXISTS answers (
    key BLOB PRIMARY KEY, body_hash BLOB NOT NULL, made REAL NOT NULL,
    status INTEGER, headers TEXT, body BLOB, size INTEGER NOT NULL DEFAULT 0,
    owner BLOB NOT NULL DEFAULT x''
);
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (made);
"""
_BY_OWNER = "CREATE INDEX IF NOT EXISTS answers_by_owner ON answers (owner, made)"

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Room:
    """How much is kept, and how long: for all owners together, and for each."""

    seconds: float
    answers: int
    size: int
    answers_of_one: int
    size_of_one: int


IN_FILE = Room(86_400.0, 100_000, 256 << 20, 5_000, 16 << 20)
# A client that lost its connection sends again within minutes. A thousand answers take a megabyte.
IN_MEMORY = Room(600.0, 2_000, 4 << 20, 500, 1 << 20)


@dataclass(frozen=True)
class Answer:
    """A stored answer. ``status`` is None when it is unknown how the request ended."""

    body_hash: bytes
    status: int | None
    headers: Headers
    body: bytes


@dataclass(frozen=True)
class RequestIdentity:
    """The identity of a request: its key, its owner, and its body."""

    key: bytes
    owner: bytes
    body_hash: bytes


@dataclass
class _Kept:
    count: int = 0
    size: int = 0


def _steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that is set once and never jumps."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class Answers:
    """The answers in a file below a directory; without one in memory, fewer and not as long."""

    def __init__(
        self,
        directory: Path | None,
        clock: Callable[[], float] | None = None,
        room: Room | None = None,
    ) -> None:
        self._room = room or (IN_MEMORY if directory is None else IN_FILE)
        path = ":memory:"
        if directory is not None:
            file = directory / "answers.db"
            file.touch(mode=0o600)
            path = str(file)
        self._clock = clock or _steady_clock()
        self._db = sqlite3.connect(
            path, timeout=10.0, isolation_level=None, check_same_thread=False
        )
        # It calls the other methods; so does a caller without an event loop.
        self._thread = None if directory is None else ThreadPoolExecutor(1, "answers")
        self._kept: dict[bytes, _Kept] = {}
        try:
            self._prepare()
        except sqlite3.Error:
            self._db.close()
            raise

    def _prepare(self) -> None:
        # A killed process loses nothing by this; a machine that fails loses the last moment.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_TABLE)
        if "owner" not in {row[1] for row in self._db.execute("PRAGMA table_info(answers)")}:
            self._db.execute("ALTER TABLE answers ADD COLUMN owner BLOB NOT NULL DEFAULT x''")
        self._db.execute(_BY_OWNER)
        self._count_all()

    @property
    def count(self) -> int:
        return sum(one.count for one in self._kept.values())

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._db.close()

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work`` in a thread, because it may wait for the file; directly if in memory."""
        if self._thread is None:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def find(self, key: bytes) -> Answer | None:
        row = self._db.execute(
            "SELECT body_hash, status, headers, body FROM answers WHERE key = ? AND made > ?",
            (key, self._clock() - self._room.seconds),
        ).fetchone()
        if row is None:
            return None
        pairs = json.loads(row[2] or "[]")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        return Answer(row[0], row[1], headers, row[3] or b"")

    def begin(self, identity: RequestIdentity) -> None:
        """Note that a request begins. Raises sqlite3.Error when it cannot be written."""
        self._db.execute(
            "INSERT OR REPLACE INTO answers (key, owner, body_hash, made) VALUES (?, ?, ?, ?)",
            (identity.key, identity.owner, identity.body_hash, self._clock()),
        )

    def complete(
        self, identity: RequestIdentity, status: int, headers: Headers, body: bytes
    ) -> None:
        """Store an answer, also where its beginning could not be written. Raises sqlite3.Error."""
        text = json.dumps([(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers])
        self._db.execute(
            "INSERT OR REPLACE INTO answers"
            " (key, owner, body_hash, made, status, headers, body, size)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                identity.key,
                identity.owner,
                identity.body_hash,
                self._clock(),
                status,
                text,
                body,
                len(body),
            ),
        )
        kept = self._kept.setdefault(identity.owner, _Kept())
        kept.count += 1
        kept.size += len(body)
        self._forget_some(identity.owner)

    def drop(self, key: bytes) -> None:
        self._db.execute("DELETE FROM answers WHERE key = ?", (key,))

    def _forget_some(self, owner: bytes) -> None:
        """Forget answers that are too old, the oldest of this owner if it has too many, and some of
        the owners with most while all together have too many."""
        if self._clock() - self._counted > _MINUTE:
            self._count_all()
        if owner in self._kept:
            self._shrink(owner, self._room.answers_of_one, self._room.size_of_one)
        while sum(one.count for one in self._kept.values()) > self._room.answers:
            self._halve(max(self._kept, key=lambda one: self._kept[one].count))
        while sum(one.size for one in self._kept.values()) > self._room.size:
            self._halve(max(self._kept, key=lambda one: self._kept[one].size))

    def _halve(self, owner: bytes) -> None:
        kept = self._kept[owner]
        self._shrink(owner, kept.count // 2, kept.size // 2)

    def _shrink(self, owner: bytes, most: int, most_bytes: int) -> None:
        """Drop somewhat more than needed, so that this is not repeated for each request."""
        kept = self._kept[owner]
        if kept.count <= most and kept.size <= most_bytes:
            return
        rows = self._db.execute(
            "SELECT key, size FROM answers WHERE owner = ? AND status IS NOT NULL ORDER BY made",
            (owner,),
        ).fetchall()
        for key, size in rows:
            if kept.count <= most * 0.9 and kept.size <= most_bytes * 0.9:
                break
            self.drop(key)
            kept.count -= 1
            kept.size -= size
        if kept.count <= 0:
            del self._kept[owner]

    def _count_all(self) -> None:
        """Drop answers that are too old, and count the others."""
        self._counted = self._clock()
        self._db.execute(
            "DELETE FROM answers WHERE made <= ?", (self._counted - self._room.seconds,)
        )
        rows = self._db.execute(
            "SELECT owner, count(*), coalesce(sum(size), 0) FROM answers"
            " WHERE status IS NOT NULL GROUP BY owner"
        )
        self._kept = {owner: _Kept(count, size) for owner, count, size in rows}
