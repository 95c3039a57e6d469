"""The audit log: who did what, when, and how it ended; append-only and chained by hashes.

One JSON object a line. Each carries the hash of the line before it and its own, over everything
else in it: a line that was changed, removed or put in between breaks the chain there, and
``verify`` says where. Several processes may write; the file lock makes them take turns. A line
that a crash cut off is taken back by the next writer, which says so in a line of its own.

Keep a copy of the last hash elsewhere to notice when the end of the log is cut off.

``prune`` removes old lines: the first line then says how many went, and which hash they ended
with, so that the rest still fits. Writers notice that the file is another one, and go on there.
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
PRUNED = "pruned"
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
        self._fd = _open(path)
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
        self._lock()
        try:
            if os.fstat(self._fd).st_size != self._end:
                self._catch_up()
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> None:
        """The lock of the file that has the name now: prune() puts another in its place."""
        while True:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if self._is_current():
                return
            current = _open(self.path)
            os.close(self._fd)
            self._fd, self._end = current, -1

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

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
        self._head, self._number = _end_of(json.loads(last)) if last else (FIRST, 0)
        if torn:
            os.ftruncate(self._fd, self._end)
            self._append("torn_line_removed", {"bytes": len(torn)})

    def prune(self, before: float) -> int:
        """Remove the lines that are older than ``before``, in seconds since 1970; how many. Those
        that stay are not touched. Raises OSError."""
        with self._turn():
            lines = self.path.read_bytes().splitlines(keepends=True)
            first = int(bool(lines) and _line(lines[0]).get("event") == PRUNED)
            old = first
            while old < len(lines) and str(_line(lines[old]).get("time", "")) < _stamp(before):
                old += 1
            if old > first:
                beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
                beside.write_bytes(_header(lines[:old]) + b"".join(lines[old:]))
                beside.chmod(0o600)
                beside.replace(self.path)
        return old - first


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _header(removed: list[bytes]) -> bytes:
    """The line that stands for those that are gone."""
    first = _line(removed[0])
    before = int(first["removed"]) - 1 if first.get("event") == PRUNED else 0
    head, number = _end_of(_line(removed[-1]))
    line = {"n": number, "time": _now(), "event": PRUNED, "previous": FIRST,
            "removed": before + len(removed), "head": head}  # fmt: skip
    return (_canonical({**line, "hash": _hash(line)}) + "\n").encode()


def _end_of(line: dict[str, Any]) -> tuple[str, int]:
    """The hash and the number that the next line goes on from."""
    return str(line["head" if line.get("event") == PRUNED else "hash"]), int(line["n"])


def _line(raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that can be read, in order."""
    with path.open("rb") as file:
        for raw in file:
            if line := _line(raw):
                yield line


def verify(path: Path) -> Verdict:
    """Whether every line is the one that was written, and none is missing in between."""
    head, number = FIRST, 0
    with path.open("rb") as file:
        for count, raw in enumerate(file, 1):
            if count == 1 and _line(raw).get("event") == PRUNED:
                number = int(_line(raw)["n"]) - 1  # it stands for all those before it
            reason, line = _fault(raw, head, number)
            if reason:
                return Verdict(count - 1, head, count, reason)
            head, number = _end_of(line)
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
    return _stamp(time.time())


def _stamp(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1e6) % 10**6:06d}Z"
