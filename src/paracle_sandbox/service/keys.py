"""API keys: made once, shown once, stored as hashes, checked in constant time.

A key is ``prc_<id>_<secret>``. The id finds the row; the secret has 256 random bits and is
compared by its hash, so that the time of an answer tells nothing about it. The keys are in an
SQLite file, so that ``paracle keys`` in another process takes effect at once. That process may
lock the file, and its disk may be slow: an event loop uses the file only through ``in_thread``,
and checks first whether there is anything new to read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from ..errors import SandboxError
from ..host.own_directory import make_trusted_directory

P = ParamSpec("P")
T = TypeVar("T")

_FORM = re.compile(r"prc_([0-9a-f]{12})_([A-Za-z0-9_-]{43})\Z")
# The file change counter, in the header of an SQLite file that has no write-ahead log.
MIN_KEY = 16
_MIN_LETTERS = 6
_OPERATOR = "operator"
_COUNTER_AT, _COUNTER_BYTES = 24, 4
_NO_HASH = hashlib.sha256(b"no key has this").hexdigest()
_TABLE = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, hash TEXT NOT NULL, admin INTEGER NOT NULL, note TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, revoked REAL
);
CREATE TABLE IF NOT EXISTS bindings (
    id TEXT NOT NULL REFERENCES keys (id), user TEXT NOT NULL, PRIMARY KEY (id, user)
);
"""


@dataclass(frozen=True)
class Caller:
    """The key that a request was sent with, and the users it may act for."""

    key_id: str
    users: frozenset[str] = frozenset()
    admin: bool = False

    def may_act_for(self, user: str) -> bool:
        return self.admin or user in self.users


@dataclass(frozen=True)
class Key:
    """One key, without its secret."""

    key_id: str
    users: tuple[str, ...]
    admin: bool
    note: str
    created: float
    expires: float | None
    revoked: float | None

    def is_good(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)


class KeyStore:
    """The keys of one service, in ``keys.db`` of its data directory."""

    def __init__(self, directory: Path) -> None:
        make_trusted_directory(str(directory), "SANDBOX_DATA_DIR")
        path = directory / "keys.db"
        path.touch(mode=0o600)
        self._db = sqlite3.connect(
            path, timeout=10.0, isolation_level=None, check_same_thread=False
        )
        self._using = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "keys")
        try:
            self._db.execute("PRAGMA journal_mode = DELETE")  # as it is by itself; see _refresh
            self._db.executescript(_TABLE)
        except sqlite3.Error:
            self._db.close()
            raise
        # Never closed before the database is: that would give up its locks.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._seen = b""
        self._known: dict[str, tuple[Key, str]] = {}  # with their hashes; replaced, not changed

    def close(self) -> None:
        self._thread.shutdown()
        self._db.close()
        os.close(self._file)

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call another method, which may wait for the file, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def make(
        self,
        users: Iterable[str] = (),
        *,
        admin: bool = False,
        expires: float | None = None,
        note: str = "",
    ) -> str:
        """Make a key and return it. Only its hash is stored, so it cannot be read again."""
        bound = sorted(set(users))
        if not bound and not admin:
            raise SandboxError("A key acts for users or is an admin key: name users, or --admin")
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        with self._using, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, NULL)",
                (key_id, _hash(secret), int(admin), note, time.time(), expires),
            )
            self._db.executemany(
                "INSERT INTO bindings VALUES (?, ?)", [(key_id, user) for user in bound]
            )
        self._seen = b""
        return f"prc_{key_id}_{secret}"

    def revoke(self, key_id: str) -> bool:
        """Revoke a key. Returns whether there was one that still worked."""
        with self._using, self._db:
            done = self._db.execute(
                "UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL",
                (time.time(), key_id),
            )
        self._seen = b""
        return done.rowcount > 0

    def all(self) -> list[Key]:
        self.refresh()
        return sorted((key for key, _ in self._known.values()), key=lambda key: key.created)

    def find(self, text: str) -> Caller | None:
        """Return the caller with this key, or None if it opens nothing."""
        self.refresh()
        return self.find_known(text)

    def find_known(self, text: str) -> Caller | None:
        """Like find(), as of the last refresh()."""
        form = _FORM.match(text)
        key_id, secret = (form[1], form[2]) if form else ("", text)
        key, digest = self._known.get(key_id, (None, _NO_HASH))
        same = hmac.compare_digest(digest, _hash(secret))
        if not same or key is None or not key.is_good(time.time()):
            return None
        return Caller(key.key_id, frozenset(key.users), key.admin)

    def is_good(self, key_id: str) -> bool:
        """Whether a key that was found before was still good at the last refresh()."""
        key, _ = self._known.get(key_id, (None, ""))
        return key is not None and key.is_good(time.time())

    @property
    def is_current(self) -> bool:
        """Whether nothing was changed since the last refresh(). Every request asks this, so it
        reads the file's change counter and not the database, which would lock the file."""
        return self._version() == self._seen

    def _version(self) -> bytes:
        return os.pread(self._file, _COUNTER_BYTES, _COUNTER_AT)

    def refresh(self) -> None:
        """Read what another process may have changed. The database waits until a change that has
        begun is complete."""
        with self._using:
            version = self._version()
            if version != self._seen:
                self._known = self._read()
                self._seen = version

    def _read(self) -> dict[str, tuple[Key, str]]:
        users: dict[str, list[str]] = {}
        for key_id, user in self._db.execute("SELECT id, user FROM bindings ORDER BY user"):
            users.setdefault(key_id, []).append(user)
        found = {}
        rows = self._db.execute("SELECT id, hash, admin, note, created, expires, revoked FROM keys")
        for key_id, digest, admin, *rest in rows:
            key = Key(key_id, tuple(users.get(key_id, ())), bool(admin), *rest)
            found[key_id] = (key, digest)
        return found


class Doorman:
    """All keys of a service: the stored ones as of the last refresh(), and the operator's own from
    the settings."""

    def __init__(self, store: KeyStore, operator_key: str | None = None) -> None:
        self._store = store
        if operator_key is not None:
            require_strength("SANDBOX_API_KEY", operator_key)
        self._operator = None if operator_key is None else _hash(operator_key)

    def find(self, text: str) -> Caller | None:
        if self._operator is not None and hmac.compare_digest(self._operator, _hash(text)):
            return Caller(_OPERATOR, admin=True)
        return self._store.find_known(text)

    @property
    def is_current(self) -> bool:
        """Whether there was no change since the last refresh()."""
        return self._store.is_current

    async def refresh(self) -> None:
        await self._store.in_thread(self._store.refresh)

    def is_good(self, key_id: str) -> bool:
        """Whether a key that was found before is still good."""
        return key_id == _OPERATOR or self._store.is_good(key_id)


def require_strength(name: str, key: str) -> None:
    """Raise SandboxError for a key that can be guessed."""
    if len(key) < MIN_KEY or len(set(key)) < _MIN_LETTERS:
        raise SandboxError(
            f"{name} is too weak: it needs at least {MIN_KEY} characters, {_MIN_LETTERS} of them "
            "different. Make one with: openssl rand -hex 32"
        )


def _hash(secret: str) -> str:
    # A plain hash will do: there is nothing to guess in 256 random bits.
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
