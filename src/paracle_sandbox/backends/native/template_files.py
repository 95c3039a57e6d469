"""The templates on disk: what is there, who uses it, who builds it, and how the last build failed.

    templates/default-CPython_3.12.3/     a template; sandboxes see this directory read-only
    templates/.default-x8_1f/             one that is being built, or that was replaced or removed
    templates/.use-123456                 locked, shared, by every process whose sandboxes see the
                                          directory with inode number 123456
    templates/.default.lock               locked by the one process that builds this template; it
                                          writes there what it has done so far
    templates/.default.failed             how the last build failed, and when

A template is complete when it has its manifest. Until then the directory is empty: sandboxes are
made with it all the same, and see the packages as soon as they are there.

No lock is ever waited for here, and none is on a file that others may open: the templates can be
read by everybody, and a lock on a file that can be read can be taken by everybody, also by programs
in a sandbox. No event loop, because the builder uses it as well.

What is here is code, and a lock is emptied: so the directory is used only when nobody else can
write to it, and every method here raises BackendUnavailableError for another. Files are opened
through its descriptor and never by way of a link, which somebody may have left when it was open to
all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ...host.own_directory import is_ours_alone
from .template_kinds import MANIFEST, open_templates, require_trusted_templates

TRY_AGAIN_SECONDS = 3600.0
_MAX_FAILURE_BYTES = 1 << 20


@dataclass
class Failure:
    """How a build failed. ``is_told``: somebody was told of it, in full."""

    reason: str
    said: str = ""
    at: float = 0.0
    is_told: bool = False

    @property
    def is_recent(self) -> bool:
        return 0 <= time.time() - self.at < TRY_AGAIN_SECONDS


class TemplateFiles:
    """One directory of templates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check(self) -> None:
        """Raises BackendUnavailableError where others can write to it."""
        require_trusted_templates(str(self.directory))

    def _open(self, *, make: bool = False) -> contextlib.AbstractContextManager[int]:
        return open_templates(str(self.directory), make=make)

    # Building

    def lock_builder(self, name: str) -> int | None:
        """The right to build a template, as a descriptor; None while another process has it.
        Raises OSError."""
        with self._open(make=True) as directory:
            return _lock(f".{name}.lock", fcntl.LOCK_EX, directory)

    @contextlib.contextmanager
    def fresh(self, name: str) -> Iterator[Path]:
        """A directory to build in, which nobody removes; whatever is left in it goes."""
        self.remove_unused(name)
        import tempfile  # takes a tenth of what a short command imports, and is for builds alone

        path = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self.directory))
        lock = self._lock_use(path.stat().st_ino, fcntl.LOCK_SH)
        try:
            yield path
        finally:
            self._delete(path)
            if lock is not None:
                os.close(lock)

    def publish(self, built: Path, path: Path, manifest: dict[str, object]) -> None:
        """Put what was built in its place, the manifest last.

        Where sandboxes see the empty directory already, it is filled, so that they gain the
        packages; anything else is replaced, and stays as it is for those who see it."""
        name = path.name.partition("-")[0]
        (built / MANIFEST).write_text(json.dumps(manifest))
        built.chmod(0o755)
        if _is_empty_and_ours(path):
            for entry in sorted(built.iterdir(), key=lambda entry: entry.name == MANIFEST):
                entry.rename(path / entry.name)
        else:
            self.hide(path)
            built.rename(path)
        self.remove_unused(name)

    # Failures

    def failure(self, name: str) -> Failure | None:
        try:
            with self._open() as directory:
                failed = _open_file(f".{name}.failed", os.O_RDONLY, directory)
            with open(failed, "rb") as file:
                return _failure_of(json.loads(file.read(_MAX_FAILURE_BYTES)))
        except (OSError, ValueError, RecursionError):
            return None

    def note_failure(self, name: str, failure: Failure) -> None:
        """Whole or not at all: others may read it."""
        with contextlib.suppress(OSError), self._open() as directory:
            written = f".{name}.failed.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(written, dir_fd=directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(_open_file(written, flags, directory, 0o644), "w", encoding="utf-8") as file:
                json.dump(asdict(failure), file)
            os.rename(written, f".{name}.failed", src_dir_fd=directory, dst_dir_fd=directory)

    def forget_failure(self, name: str) -> None:
        with contextlib.suppress(OSError), self._open() as directory:
            os.unlink(f".{name}.failed", dir_fd=directory)

    # Steps

    def steps_path(self, name: str) -> Path:
        """Steps of the last build, or of the one that is under way."""
        return self.directory / f".{name}.lock"

    # Use and removal

    def hold(self, path: Path) -> int | None:
        """A descriptor that keeps the files of a template until it is closed. None when it is not
        there any more, or where nothing can be locked: then nobody can remove it, either."""
        with contextlib.suppress(OSError):
            number = path.stat().st_ino
            lock = self._lock_use(number, fcntl.LOCK_SH)
            # Replaced meanwhile: the lock is on what was removed.
            if lock is not None and path.stat().st_ino != number:
                os.close(lock)
                return self.hold(path)
            return lock
        return None

    def hide(self, path: Path) -> None:
        """Out of sight, so that nobody starts on half a template."""
        self.check()
        name = path.name.partition("-")[0]
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f".{name}-{os.getpid()}-{time.monotonic_ns()}"))

    def remove_unused(self, name: str) -> None:
        """What was hidden and nobody sees any more, and what killed builders left."""
        self.check()
        for path in self.directory.glob(f".{name}-*"):
            with contextlib.suppress(OSError):
                lock = self._lock_use(path.lstat().st_ino, fcntl.LOCK_EX)
                if lock is not None:
                    self._delete(path)
                    os.close(lock)

    def _delete(self, path: Path) -> None:
        number = None
        with contextlib.suppress(OSError):
            number = path.lstat().st_ino
        if path.is_symlink():
            with contextlib.suppress(OSError):
                path.unlink()
        import shutil

        shutil.rmtree(path, ignore_errors=True)
        if number is not None and not os.path.lexists(path):
            with contextlib.suppress(OSError):
                (self.directory / f".use-{number}").unlink()

    def _lock_use(self, number: int, kind: int) -> int | None:
        """Of the directory with this inode number."""
        with self._open() as directory:
            return _lock(f".use-{number}", kind, directory)


def _is_empty_and_ours(path: Path) -> bool:
    """Whether it can be filled: what others made, or made a link of, is replaced."""
    try:
        return is_ours_alone(path.lstat()) and not any(path.iterdir())
    except OSError:
        return False


def _failure_of(content: object) -> Failure:
    """Raises ValueError for what is none."""
    match content:
        case {"reason": str(reason), "said": str(said), "at": float(at), "is_told": bool(is_told)}:
            return Failure(reason, said, at, is_told)
    raise ValueError("this is no failure")


def _open_file(name: str, flags: int, directory: int, mode: int = 0) -> int:
    """A file of the directory; OSError for a link, a fifo, and one that has another name too."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(name, flags, mode, dir_fd=directory)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(file)
        raise PermissionError(errno.EPERM, "it is not a file of its own", name)
    return file


def _lock(name: str, kind: int, directory: int) -> int | None:
    """A descriptor with a lock; None while somebody else has it. Raises OSError."""
    lock = _open_file(name, os.O_RDWR | os.O_CREAT, directory, 0o600)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def follow(path: Path) -> Callable[[], list[str]]:
    """A function that returns the lines which were added since it was last called."""
    offset = 0

    def read() -> list[str]:
        nonlocal offset
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < offset:
                    offset = 0  # another build has begun
                file.seek(offset)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if not whole:
            return []
        offset += len(whole) + 1
        return whole.decode(errors="replace").splitlines()

    return read
