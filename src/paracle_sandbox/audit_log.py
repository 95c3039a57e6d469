"""The audit log: who did what, when, and how it ended; append-only and chained by hashes.

One JSON object a line. Each carries the hash of the line before it and its own, over everything
else in it: a line that was changed, removed or put in between breaks the chain there, and
``verify`` says where. Several processes may write; the file lock makes them take turns. A line
that a crash cut off is taken back by the next writer, which says so in a line of its own.

A file that has grown large is set aside under the number of its last line (audit.jsonl becomes
audit-000000012345.jsonl), and the next line begins a new one: numbers and hashes go on, and
whoever reads takes all files for one log. Who waited for the lock meanwhile finds that the name
leads elsewhere, and follows it.

``prune`` removes old lines: the first line then says how many went, and which hash they ended
with, so that the rest still fits.

Keep a copy of the last hash elsewhere to notice when the end of the log is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

FIRST = "0" * 64
MAX_BYTES = 64 << 20
PRUNED = "pruned"
_MAX_TEXT = 2000
_TAIL = 64 << 10
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Verdict:
    """``broken_at`` is the first line that does not fit, by its place in the log; None when all
    do. ``file`` is the one that has it."""

    lines: int
    head: str
    broken_at: int | None = None
    reason: str = ""
    file: str = ""


class AuditLog:
    """Appends to ``path``. Never raises OSError: who cannot log says so once, loudly."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.failures = 0
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = -1
        self._open()
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
                self._set_aside_when_large()
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

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        self.close()
        self._fd = fd

    def _lock(self) -> None:
        """The lock of the file that has the name now: another may have been set aside."""
        while True:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if _leads_to(self.path, self._fd):
                return
            self._end = -1
            self._open()

    def _append(self, event: str, fields: dict[str, object]) -> None:
        line = {"n": self._number + 1, "time": _now(), "event": event}
        line |= {name: _bounded(value) for name, value in fields.items() if value is not None}
        line["previous"] = self._head
        digest, data = _sealed(line)
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, self._end)
            raise OSError("the disk is full")
        self._end += written
        self._head = digest
        self._number += 1

    def _set_aside_when_large(self) -> None:
        """The next line begins a new file. Who waits for the lock of this one finds out."""
        if self._end >= self._max_bytes:
            os.rename(self.path, _aside(self.path, self._number))
            self._open()
            self._end = -1

    def _catch_up(self) -> None:
        """Another process has written, or this one has just begun, or the file has."""
        size = os.fstat(self._fd).st_size
        last, torn = _last_line(self._fd, size)
        self._end = size - len(torn)
        if not last:
            last = _last_line_before(self.path)
        if last:
            self._head, self._number = _end_of(json.loads(last))
        if torn:
            os.ftruncate(self._fd, self._end)
            self._append("torn_line_removed", {"bytes": len(torn)})

    def prune(self, before: float) -> int:
        """Remove the lines that are older than ``before``, in seconds since 1970; how many. Those
        that stay are not touched. Raises OSError."""
        stamp, header, emptied = _stamp(before), _Header(), []
        with self._turn():
            for name in (*_set_aside(self.path), self.path):
                lines = name.read_bytes().splitlines(keepends=True)
                kept = header.stand_for(lines, stamp)
                if kept or name == self.path:
                    break
                emptied.append(name)
            if header.new:
                _replace(name, header.raw() + b"".join(kept))
                for name in emptied:
                    name.unlink()
        return header.new


class _Header:
    """The line that stands for those that are gone: ``new`` of them now, the others before."""

    def __init__(self) -> None:
        self.new = 0
        self._before = 0
        self._last: dict[str, Any] = {}

    def stand_for(self, lines: list[bytes], stamp: str) -> list[bytes]:
        """For those at the beginning that are older; the others."""
        for place, raw in enumerate(lines):
            line = _parsed(raw) or {}
            if line.get("event") == PRUNED:
                self._before = int(line["removed"])
            elif str(line.get("time", "")) < stamp:
                self.new += 1
            else:
                return lines[place:]
            self._last = line
        return []

    def raw(self) -> bytes:
        head, number = _end_of(self._last)
        line = {"n": number, "time": _now(), "event": PRUNED, "previous": FIRST,
                "removed": self._before + self.new, "head": head}  # fmt: skip
        return _sealed(line)[1]


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.chmod(0o600)
    beside.replace(path)


def _end_of(line: dict[str, Any]) -> tuple[str, int]:
    """The hash and the number that the next line goes on from."""
    return str(line["head" if line.get("event") == PRUNED else "hash"]), int(line["n"])


# Reading: all files of a log are one


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that can be read, in order."""
    with ExitStack() as stack:
        for file in _files(path, stack):
            for raw in file:
                line = _parsed(raw)
                if line is not None:
                    yield line


def verify(path: Path, after: str = FIRST) -> Verdict:
    """Whether every line is the one that was written, and none is missing in between. ``after``
    is the hash of the last line that is kept elsewhere, when the first files are."""
    head, number, count = after, 0, 0
    with ExitStack() as stack:
        for file in _files(path, stack):
            for raw in file:
                if not count and (after != FIRST or (_parsed(raw) or {}).get("event") == PRUNED):
                    number = _number_before(raw)
                count += 1
                reason, line = _fault(raw, head, number)
                if reason:
                    return Verdict(count - 1, head, count, reason, os.path.basename(file.name))
                head, number = _end_of(line)
    return Verdict(count, head)


def follow(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are written from now on, from file to file. Never ends."""
    file = path.open("rb")
    try:
        file.seek(0, os.SEEK_END)
        held = b""
        while True:
            is_over = not _leads_to(path, file.fileno())  # asked first: then nobody writes to it
            held += file.readline()
            if held.endswith(b"\n"):
                if (line := _parsed(held)) is not None:
                    yield line
                held = b""
            elif is_over and (following := _next_file(path, file)).exists():
                file.close()
                file = following.open("rb")
            else:
                time.sleep(_PAUSE_SECONDS)
    finally:
        file.close()


def is_there(path: Path) -> bool:
    return path.exists() or (path.parent.is_dir() and bool(_set_aside(path)))


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:012d}{path.suffix}")


def _set_aside(path: Path) -> list[Path]:
    """The earlier files of a log, the first first."""
    form = re.compile(re.escape(path.stem) + r"-[0-9]{12}" + re.escape(path.suffix))
    return sorted(one for one in path.parent.iterdir() if form.fullmatch(one.name))


def _files(path: Path, stack: ExitStack) -> Iterator[IO[bytes]]:
    """All files, in order. The newest is opened first: one that is set aside meanwhile is then
    the same file under another name, and none is missed or read twice."""
    newest: IO[bytes] | None = None
    try:
        newest = stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        if not _set_aside(path):
            raise
    for name in _set_aside(path):
        if newest is not None and _leads_to(name, newest.fileno()):
            break
        with name.open("rb") as file:
            yield file
    if newest is not None:
        yield newest


def _next_file(path: Path, file: IO[bytes]) -> Path:
    """The one that goes on where this one, which was set aside, ends."""
    names = [*_set_aside(path), path]
    here = next((n for n, name in enumerate(names) if _leads_to(name, file.fileno())), -1)
    return names[here + 1] if 0 <= here < len(names) - 1 else path


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _last_line(fd: int, size: int) -> tuple[bytes, bytes]:
    """The last whole line, empty if there is none, and what follows it without an end."""
    want = _TAIL
    while True:
        tail = os.pread(fd, want, max(0, size - want))
        whole, end, torn = tail.rpartition(b"\n")
        if want >= size or b"\n" in whole:
            return (whole.rpartition(b"\n")[2] if end else b""), torn
        want *= 4


def _last_line_before(path: Path) -> bytes:
    """The last line of the file before a new one."""
    for name in reversed(_set_aside(path)):
        with name.open("rb") as file:
            return _last_line(file.fileno(), os.fstat(file.fileno()).st_size)[0]
    return b""


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _number_before(raw: bytes) -> int:
    """The number that the line before this one had, by what this one says."""
    number = (_parsed(raw) or {}).get("n")
    return number - 1 if isinstance(number, int) else 0


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


def _sealed(line: dict[str, Any]) -> tuple[str, bytes]:
    """Its hash, and the line as it is written: with that in its place among the names, which are
    sorted. Every line has names before it ("event") and after it ("n")."""
    before = _canonical({name: value for name, value in line.items() if name < "hash"})[:-1]
    after = _canonical({name: value for name, value in line.items() if name > "hash"})[1:]
    digest = hashlib.sha256(f"{before},{after}".encode()).hexdigest()
    return digest, f'{before},"hash":"{digest}",{after}\n'.encode()


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


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
