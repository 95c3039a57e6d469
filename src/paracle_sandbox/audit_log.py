"""The audit log: who did what, when, and how it ended; append-only and chained by hashes.

One JSON object a line. Each carries the hash of the line before it and its own, over everything
else in it: a line that was changed, removed or put in between breaks the chain there, and
``verify`` says where. Several processes may write; the file lock makes them take turns. A line
that a crash cut off is taken back by the next writer, which says so in a line of its own.

Keep a copy of the last hash elsewhere to notice when the end of the log is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FIRST = "0" * 64
_MAX_TEXT = 2000
_TAIL = 64 << 10


@dataclass(frozen=True)
class Verdict:
    """``broken_at`` is the first line that does not fit, counted from 1; None when all do."""

    lines: int
    head: str
    broken_at: int | None = None
    reason: str = ""


class AuditLog:
    """Appends to ``path``. Never raises OSError: who cannot log says so once, loudly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end = -1
        self._head = FIRST
        self._number = 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def record(self, event: str, **fields: object) -> None:
        """One line. Text is cut to a length that no flood of requests can abuse."""
        try:
            with self._turn():
                self._append(event, fields)
        except OSError as error:
            self.failures += 1
            logger.error("The audit log %s cannot be written: %s", self.path, error)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            if os.fstat(self._fd).st_size != self._end:
                self._catch_up()
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _append(self, event: str, fields: dict[str, object]) -> None:
        line = {"n": self._number + 1, "time": _now(), "event": event}
        line |= {name: _bounded(value) for name, value in fields.items() if value is not None}
        line["previous"] = self._head
        digest = _hash(line)
        data = (_canonical({**line, "hash": digest}) + "\n").encode()
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, self._end)
            raise OSError("the disk is full")
        self._end += written
        self._head = digest
        self._number += 1

    def _catch_up(self) -> None:
        """Another process has written, or this one has just begun."""
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _TAIL, max(0, size - _TAIL))
        whole, _, torn = tail.rpartition(b"\n")
        self._end = size - len(torn)
        last = whole.rpartition(b"\n")[2]
        if last:
            found = json.loads(last)
            self._head, self._number = str(found["hash"]), int(found["n"])
        if torn:
            os.ftruncate(self._fd, self._end)
            self._append("torn_line_removed", {"bytes": len(torn)})


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that can be read, in order."""
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def verify(path: Path) -> Verdict:
    """Whether every line is the one that was written, and none is missing in between."""
    head, number = FIRST, 0
    with path.open("rb") as file:
        for count, raw in enumerate(file, 1):
            reason, line = _fault(raw, head, number)
            if reason:
                return Verdict(count - 1, head, count, reason)
            head, number = str(line["hash"]), int(line["n"])
    return Verdict(number, head)


def _fault(raw: bytes, head: str, number: int) -> tuple[str, dict[str, Any]]:
    try:
        line = json.loads(raw)
        digest = line.pop("hash")
    except (ValueError, KeyError, AttributeError, TypeError):
        return "not a line of an audit log", {}
    if line.get("previous") != head:
        return "the line before it was changed or removed", {}
    if line.get("n") != number + 1:
        return "its number does not follow", {}
    if _hash(line) != digest:
        return "it was changed", {}
    return "", {**line, "hash": digest}


def _hash(line: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(line).encode()).hexdigest()


def _canonical(line: dict[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, separators=(",", ":"))


def _bounded(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(k)[:100]: _bounded(v) for k, v in list(value.items())[:50]}
    if isinstance(value, list | tuple):
        return [_bounded(item) for item in value[:50]]
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text)} characters)"


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1e6) % 10**6:06d}Z"
