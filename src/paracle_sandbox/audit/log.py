"""The audit log records who did what and how it ended. It is append-only and chained by hashes.

Each line is a JSON object. It has the hash of the line before it, and its own hash over everything
else in it: a line that was changed, removed or inserted breaks the chain there, and ``verify``
returns where. Several processes may write, one at a time under the lock of the file. A line that a
crash cut off is removed by the next writer, which records that in a line of its own.

A file that has grown large is archived under the number of its last line (audit.jsonl becomes
audit-000000012345.jsonl), and the next line begins a new file. Numbers and hashes continue, and
readers take all files for one log. A writer that waited for the lock meanwhile notices that the
name now belongs to another file, and opens that one.

``prune`` removes old lines. The first line then says how many were removed and which hash they
ended with, so that the rest still fits. That line is sealed with a key in a file beside the log
that only its owner can read: otherwise any process that can write to the log could replace its
beginning by such a line. Without the key, ``verify`` needs the hash that the removed lines ended
with.

Lines that cannot be written, as on a full disk, are counted. Before the next line that can be
written comes one that says how many were lost, and of which events.

Writing waits for the disk, and for the lock, which another process may hold for long. An event loop
therefore never writes by itself: it passes its lines to an ``AuditQueue``, whose one thread writes
them in order.

Keep a copy of the last hash elsewhere to notice when the end of the log is cut off.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..host.platforms import lock_file, open_flags, unlock_file

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

FIRST = "0" * 64
MAX_BYTES = 64 << 20
PRUNED = "pruned"
LOST = "lines_lost"
_MAX_TEXT = 2000
_TAIL = 64 << 10
_PAUSE_SECONDS = 0.2
# So many lines may wait for the disk. With the longest texts they take tens of megabytes.
_QUEUE_LINES = 5_000
# A response waits this long for lines that were queued before it, and a shutdown for all.
WRITE_SECONDS = 10.0


@dataclass(frozen=True)
class Verdict:
    """The outcome of ``verify``. ``broken_at`` is the number of the first line that does not fit,
    or None, and ``file`` the file that it is in. ``removed`` lines before the first were pruned."""

    lines: int
    head: str
    broken_at: int | None = None
    reason: str = ""
    file: str = ""
    removed: int = 0


@dataclass(frozen=True)
class _Line:
    """One line to be written. ``fields`` are cut to size, and do not change any more."""

    event: str
    time: str
    fields: dict[str, object]


@dataclass(frozen=True)
class _Loss:
    """Lines that found no room in the queue. It takes their position in the queue."""

    since: str
    events: Counter[str]


class AuditLog:
    """Appends lines to ``path``. It never raises OSError: a line that cannot be written is
    logged as an error and counted."""

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
        self._lost: Counter[str] = Counter()
        self._lost_since = ""
        self._process_lock = threading.Lock()  # all threads of a process share the lock of the file

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def record(self, event: str, **fields: object) -> None:
        """Write one line. Texts are cut, so that a flood of requests cannot fill the disk."""
        self.write(_Line(event, _format_now(), _limit_fields(fields)))

    def write(self, line: _Line) -> None:
        """Write a line that was made before."""
        try:
            with self._locked():
                self._append_loss()
                self._append(line)
                self._archive_when_large()
        except OSError as error:
            self.lose(Counter((line.event,)), _format_now())
            logger.error("The audit log %s cannot be written: %s", self.path, error)

    def lose(self, events: Counter[str], since: str) -> None:
        """Count lines that will not be written. Before the next line comes one that says so."""
        self.failures += events.total()
        self._lost_since = self._lost_since or since
        self._lost += events

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._process_lock:
            self._lock()
            try:
                if os.fstat(self._fd).st_size != self._end:
                    self._catch_up()
                yield
            finally:
                unlock_file(self._fd)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | open_flags("O_CLOEXEC")
        fd = os.open(self.path, flags, 0o600)
        self.close()
        self._fd = fd

    def _lock(self) -> None:
        """Lock the file that has the name now. The one we have open may have been archived."""
        while True:
            lock_file(self._fd)
            if _is_same_file(self.path, self._fd):
                return
            self._end = -1
            self._open()

    def _append(self, line: _Line) -> None:
        whole: dict[str, Any] = {"n": self._number + 1, "time": line.time, "event": line.event}
        digest, data = _serialize_line({**whole, **line.fields, "previous": self._head})
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, self._end)
            raise OSError("the disk is full")
        self._end += written
        self._head = digest
        self._number += 1

    def _append_loss(self) -> None:
        """Write how many lines were lost before, if any."""
        if not self._lost:
            return
        fields = {"count": self._lost.total(), "since": self._lost_since, "events": self._lost}
        self._append(_Line(LOST, _format_now(), _limit_fields(fields)))
        self._lost, self._lost_since = Counter(), ""

    def _archive_when_large(self) -> None:
        """Archive the file, so that the next line begins a new one. Writers that wait for the
        lock of this one notice that."""
        if self._end >= self._max_bytes:
            os.rename(self.path, _make_archived_path(self.path, self._number))
            self._open()
            self._end = -1

    def _catch_up(self) -> None:
        """Read the end of the file: another process has written, or the file was just opened."""
        size = os.fstat(self._fd).st_size
        last, torn = _read_last_line(self._fd, size)
        self._end = size - len(torn)
        if not last:
            last = _read_last_archived_line(self.path)
        found = (_parse_line(last) or {}) if last else {}
        is_whole = isinstance(found.get("hash"), str) and isinstance(found.get("n"), int)
        if is_whole:
            self._head, self._number = _get_end(found)
        if torn:
            os.ftruncate(self._fd, self._end)
        if last and not is_whole:
            self._continue_after_damage(last)
        if torn:
            self._append(_Line("torn_line_removed", _format_now(), {"bytes": len(torn)}))

    def _continue_after_damage(self, damaged: bytes) -> None:
        """Continue behind a last line that is not valid. ``verify`` returns that line as broken."""
        numbers = [line["n"] for line in read(self.path) if isinstance(line.get("n"), int)]
        self._number = max(numbers, default=0) + 1
        self._head = hashlib.sha256(damaged).hexdigest()
        logger.error("The audit log %s has a damaged line at its end", self.path)
        self._append(_Line("damaged_line", _format_now(), {"bytes": len(damaged)}))

    def prune(self, before: float) -> int:
        """Remove the lines that are older than ``before``, in seconds since 1970, and return how
        many. The other lines do not change. Raises OSError."""
        stamp, header, emptied = _format_time(before), _Header(), []
        with self._locked():
            for name in (*_list_archived_files(self.path), self.path):
                lines = name.read_bytes().splitlines(keepends=True)
                kept = header.count_removed(lines, stamp)
                if kept or name == self.path:
                    break
                emptied.append(name)
            if header.new:
                _replace(name, header.to_line(_make_key(self.path)) + b"".join(kept))
                for name in emptied:
                    name.unlink()
        return header.new


class AuditQueue:
    """Writes to ``log`` from one thread, so that recording a line never waits for the disk.

    Lines keep their order. If ``room`` lines wait already, the next one is counted as lost. Lines
    that are queued when the process exits are not written: call ``end`` before."""

    def __init__(self, log: AuditLog, room: int = _QUEUE_LINES) -> None:
        self.log = log
        self._room = room
        self._waiting: deque[_Line | _Loss] = deque()
        self._changed = threading.Condition()
        self._queued = self._done = 0
        self._thread: threading.Thread | None = None
        self._ended = False
        self._waiters: dict[asyncio.Future[None], int] = {}

    @property
    def failures(self) -> int:
        """The number of lines that are not in the log and will not be."""
        with self._changed:
            queued = sum(one.events.total() for one in self._waiting if isinstance(one, _Loss))
        return self.log.failures + queued

    @property
    def is_written(self) -> bool:
        """Whether no line waits to be written."""
        return self._done == self._queued

    def record(self, event: str, **fields: object) -> None:
        """Queue one line, with the present time. Any thread may call this."""
        line = _Line(event, _format_now(), _limit_fields(fields))
        with self._changed:
            if self._ended or len(self._waiting) >= self._room:
                self._lose(line)
                return
            self._waiting.append(line)
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="audit-log", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _lose(self, line: _Line) -> None:
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, _Loss):
            last.events[line.event] += 1
            return
        logger.error("The audit log %s is written too slowly: lines are lost", self.log.path)
        self._waiting.append(_Loss(line.time, Counter((line.event,))))
        self._queued += 1

    async def wait_until_written(self, timeout: float = WRITE_SECONDS) -> bool:
        """Wait until all lines that are queued now are written or counted as lost. Returns False if
        some still wait after ``timeout`` seconds."""
        import asyncio

        with self._changed:
            if self._done == self._queued:
                return True
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[future] = self._queued
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            logger.error("The audit log %s has not been written for %g s", self.log.path, timeout)
            return False
        finally:
            with self._changed:
                self._waiters.pop(future, None)
        return True

    def end(self, timeout: float = WRITE_SECONDS) -> bool:
        """Write what is queued, for at most ``timeout`` seconds. Returns whether all is written, so
        that the log can be closed. Lines that come later are lost."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            left = len(self._waiting)
            logger.error("The audit log %s ends without its last %d lines", self.log.path, left)
        return not self._thread.is_alive()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                line = self._waiting[0]  # it counts as waiting until it is written
                if isinstance(line, _Loss):
                    self._waiting.popleft()
            try:
                if isinstance(line, _Loss):
                    self.log.lose(line.events, line.since)
                else:
                    self.log.write(line)
            except Exception:  # the lines behind it have to be written all the same
                logger.exception("A line of the audit log %s cannot be written", self.log.path)
                if isinstance(line, _Line):
                    self.log.lose(Counter((line.event,)), line.time)
            with self._changed:
                if isinstance(line, _Line):
                    self._waiting.popleft()
                self._done += 1
                for future, number in self._waiters.items():
                    if number <= self._done:
                        _wake_waiter(future)


def _wake_waiter(future: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop was closed meanwhile
        future.get_loop().call_soon_threadsafe(_finish_future, future)


def _finish_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Header:
    """The first line of a pruned log, which replaces the removed lines. ``new`` of them were
    removed now, the others before."""

    def __init__(self) -> None:
        self.new = 0
        self._before = 0
        self._last: dict[str, Any] = {}

    def count_removed(self, lines: list[bytes], stamp: str) -> list[bytes]:
        """Count the lines at the beginning that are older than ``stamp``, and return the others."""
        for index, raw in enumerate(lines):
            line = _parse_line(raw) or {}
            if line.get("event") == PRUNED:
                self._before = int(line["removed"])
            elif str(line.get("time", "")) < stamp:
                self.new += 1
            else:
                return lines[index:]
            self._last = line
        return []

    def to_line(self, key: bytes) -> bytes:
        """Return the sealed line."""
        head, number = _get_end(self._last)
        line = {"n": number, "time": _format_now(), "event": PRUNED, "previous": FIRST,
                "removed": self._before + self.new, "head": head}  # fmt: skip
        return _serialize_line({**line, "seal": _compute_seal(line, key)})[1]


def _get_key_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.key")


def _find_key(path: Path) -> bytes | None:
    """Return the key that seals the first line of this log, or None if it cannot be read."""
    try:
        return bytes.fromhex(_get_key_path(path).read_text())
    except (OSError, ValueError):
        return None


def _make_key(path: Path) -> bytes:
    """Return the key, which is made if there is none. The caller holds the lock. Raises OSError."""
    key = _find_key(path)
    if key is None:
        key = secrets.token_bytes(32)
        _replace(_get_key_path(path), key.hex().encode())
    return key


def _compute_seal(line: dict[str, Any], key: bytes) -> str:
    bare = {name: value for name, value in line.items() if name not in ("seal", "hash")}
    return hmac.new(key, _canonical(bare).encode(), hashlib.sha256).hexdigest()


def _check_header(path: Path, raw: bytes, after: str) -> str:
    """Return why the first line cannot replace lines that were removed, or an empty text."""
    line = _parse_line(raw) or {}
    if after != FIRST:
        return "" if line.get("head") == after else "other lines than those were removed before it"
    key = _find_key(path)
    if key is None:
        return "lines were removed before it, and neither its key nor their last hash is known here"
    if not hmac.compare_digest(str(line.get("seal")).encode(), _compute_seal(line, key).encode()):
        return "lines were removed before it, but not by paracle: its seal is wrong"
    return ""


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | open_flags("O_CLOEXEC"), 0o600)
    with open(fd, "wb") as file:
        file.write(content)
    beside.replace(path)


def _get_end(line: dict[str, Any]) -> tuple[str, int]:
    """Return the hash and the number that the next line continues."""
    return str(line["head" if line.get("event") == PRUNED else "hash"]), int(line["n"])


# Reading. All files of a log are read as one.


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that can be parsed, in order."""
    with ExitStack() as stack:
        for file in _open_files(path, stack):
            for raw in file:
                line = _parse_line(raw)
                if line is not None:
                    yield line


def verify(path: Path, after: str = FIRST) -> Verdict:
    """Check that every line is as it was written, and that none is missing in between.

    ``after`` is the hash of the line before the first one here: the last line of files that are
    kept elsewhere, or the last pruned line if the key is not here."""
    head, number, count, removed = after, 0, 0, 0
    with ExitStack() as stack:
        for file in _open_files(path, stack):
            for raw in file:
                reason = ""
                if not count:
                    is_pruned = (_parse_line(raw) or {}).get("event") == PRUNED
                    if is_pruned or after != FIRST:
                        number = _get_number_before(raw)
                    if is_pruned:
                        reason, head = _check_header(path, raw, after), FIRST
                count += 1
                fault, line = _check_line(raw, head, number)
                if reason := fault or reason:
                    return Verdict(count - 1, head, count, reason, os.path.basename(file.name))
                if line["event"] == PRUNED and isinstance(line.get("removed"), int):
                    removed = line["removed"]
                head, number = _get_end(line)
    return Verdict(count, head, removed=removed)


def follow(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are written from now on, from file to file. It never ends."""
    file = path.open("rb")
    try:
        file.seek(0, os.SEEK_END)
        held = b""
        while True:
            # Look before the read: once another file has the name, no process writes to this one.
            is_archived = not _is_same_file(path, file.fileno())
            held += file.readline()
            if held.endswith(b"\n"):
                if (line := _parse_line(held)) is not None:
                    yield line
                held = b""
            elif is_archived and (following := _find_next_file(path, file)).exists():
                file.close()
                file = following.open("rb")
            else:
                time.sleep(_PAUSE_SECONDS)
    finally:
        file.close()


def is_there(path: Path) -> bool:
    """Whether there is such a log: its file, or archived files of it."""
    return path.exists() or (path.parent.is_dir() and bool(_list_archived_files(path)))


def _make_archived_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:012d}{path.suffix}")


def _list_archived_files(path: Path) -> list[Path]:
    """Return the archived files of a log, oldest first."""
    form = re.compile(re.escape(path.stem) + r"-[0-9]{12}" + re.escape(path.suffix))
    return sorted(one for one in path.parent.iterdir() if form.fullmatch(one.name))


def _open_files(path: Path, stack: ExitStack) -> Iterator[IO[bytes]]:
    """Yield all files in order. The newest is opened first: if it is archived meanwhile, it is the
    same file under another name, so that none is missed or read twice."""
    newest: IO[bytes] | None = None
    try:
        newest = stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        if not _list_archived_files(path):
            raise
    for name in _list_archived_files(path):
        if newest is not None and _is_same_file(name, newest.fileno()):
            break
        with name.open("rb") as file:
            yield file
    if newest is not None:
        yield newest


def _find_next_file(path: Path, file: IO[bytes]) -> Path:
    """Return the file that continues where this one, which was archived, ends."""
    names = [*_list_archived_files(path), path]
    here = next((n for n, name in enumerate(names) if _is_same_file(name, file.fileno())), -1)
    return names[here + 1] if 0 <= here < len(names) - 1 else path


def _is_same_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _read_last_line(fd: int, size: int) -> tuple[bytes, bytes]:
    """Return the last whole line, which may be empty, and the bytes of a torn line after it."""
    want = _TAIL
    while True:
        tail = os.pread(fd, want, max(0, size - want))
        whole, end, torn = tail.rpartition(b"\n")
        if want >= size or b"\n" in whole:
            return (whole.rpartition(b"\n")[2] if end else b""), torn
        want *= 4


def _read_last_archived_line(path: Path) -> bytes:
    """Return the last line of the newest archived file."""
    for name in reversed(_list_archived_files(path)):
        with name.open("rb") as file:
            return _read_last_line(file.fileno(), os.fstat(file.fileno()).st_size)[0]
    return b""


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _get_number_before(raw: bytes) -> int:
    """Return the number of the line before this one, as this line implies it."""
    number = (_parse_line(raw) or {}).get("n")
    return number - 1 if isinstance(number, int) else 0


def _check_line(raw: bytes, head: str, number: int) -> tuple[str, dict[str, Any]]:
    try:
        line = json.loads(raw)
        digest = line.pop("hash")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return "not a line of an audit log", {}
    if line.get("previous") != head:
        return "the line before it was changed or removed", {}
    if line.get("n") != number + 1:
        return "its number does not follow", {}
    if _hash_line(line) != digest:
        return "it was changed", {}
    return "", {**line, "hash": digest}


def _hash_line(line: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(line).encode()).hexdigest()


def _serialize_line(line: dict[str, Any]) -> tuple[str, bytes]:
    """Return the hash of a line, and its bytes. The hash is inserted among the sorted names without
    encoding the line twice: every line has names before it ("event") and after it ("n")."""
    before = _canonical({name: value for name, value in line.items() if name < "hash"})[:-1]
    after = _canonical({name: value for name, value in line.items() if name > "hash"})[1:]
    digest = hashlib.sha256(f"{before},{after}".encode()).hexdigest()
    return digest, f'{before},"hash":"{digest}",{after}\n'.encode()


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _limit_fields(fields: dict[str, object]) -> dict[str, object]:
    return {name: _limit_value(value) for name, value in fields.items() if value is not None}


def _limit_value(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(k)[:100]: _limit_value(v) for k, v in list(value.items())[:50]}
    if isinstance(value, list | tuple):
        return [_limit_value(item) for item in value[:50]]
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text)} characters)"


def _format_now() -> str:
    return _format_time(time.time())


def _format_time(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1e6) % 10**6:06d}Z"
