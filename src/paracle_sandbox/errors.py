"""Every error a user can meet, in one tree.

    SandboxError (RuntimeError)
    ├── SandboxCreationError        the place could not be made
    │   ├── BackendUnavailableError   this kind of isolation cannot be had here
    │   │   └── DockerConnectionError   Docker is not available
    │   └── SandboxConflictError      a sandbox with that id exists already
    ├── StoppedError                a program did not end by itself; with what it had printed
    │   ├── SandboxExecutionError     the place itself broke while something ran in it
    │   ├── ResourceLimitError        a limit was reached and the program was stopped
    │   └── SandboxTimeoutError       the deadline passed (also a TimeoutError)
    ├── SandboxCleanupError         something could not be removed
    ├── SandboxLimitError           no room for one more sandbox
    ├── SandboxNotFoundError        no sandbox has that id (also a KeyError)
    └── SandboxFileError            a file operation failed
        ├── SandboxFileNotFoundError  (also a FileNotFoundError)
        ├── SandboxFileExistsError    (also a FileExistsError)
        ├── SandboxIsADirectoryError  (also an IsADirectoryError)
        ├── SandboxNotADirectoryError (also a NotADirectoryError)
        ├── SandboxPermissionError    (also a PermissionError)
        ├── SandboxFileDecodeError    the file is not text (also a UnicodeDecodeError)
        └── SandboxPathError          the path leaves the sandbox's places (also a ValueError)

    InvalidValueError (ValueError)  what the caller gave cannot be used

A program that fails on its own is not an error: it is a result with ``success: False``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Protocol, Self

    class Printed(Protocol):
        """Holds what a program printed; its text is made when it is read."""

        def text(self) -> str: ...


class SandboxError(RuntimeError):
    """Base of every error of this package."""

    def __init__(self, message: str, sandbox_id: str | None = None) -> None:
        # By name: the next class may be one of Python's own, which wants other arguments.
        RuntimeError.__init__(self, message)
        self.message = message
        self.sandbox_id = sandbox_id

    def __str__(self) -> str:
        return self.message


class SandboxCreationError(SandboxError):
    """The sandbox could not be created; ``step`` names the step that failed, if one did."""

    def __init__(
        self, message: str, sandbox_id: str | None = None, step: str | None = None
    ) -> None:
        super().__init__(message, sandbox_id)
        self.step = step


class BackendUnavailableError(SandboxCreationError):
    """This kind of isolation cannot be had on this machine; the message says why and what to do."""


class DockerConnectionError(BackendUnavailableError):
    """Docker is not available."""


class StoppedError(SandboxError):
    """A program was stopped, or lost its place: carries what it had printed until then."""

    def __init__(
        self,
        message: str,
        sandbox_id: str | None = None,
        *,
        stdout: str | Printed = "",
        stderr: str | Printed = "",
    ) -> None:
        super().__init__(message, sandbox_id)
        self._stdout = stdout
        self._stderr = stderr

    def again(self) -> Self:
        """Return a copy of the error, for one more caller that waits. A raised error holds the
        frames that it passes through, and these hold the command: if it were the command's own
        error, only the garbage collector could let go of the output."""
        fresh = type(self)(self.message)
        fresh.__dict__.update(self.__dict__)
        fresh.__cause__ = self.__cause__
        return fresh

    # A flood need not be made text for a caller who only wants to know what happened.

    @property
    def stdout(self) -> str:
        held = self._stdout
        if not isinstance(held, str):
            self._stdout = held = held.text()
        return held

    @stdout.setter
    def stdout(self, text: str) -> None:
        self._stdout = text

    @property
    def stderr(self) -> str:
        held = self._stderr
        if not isinstance(held, str):
            self._stderr = held = held.text()
        return held

    @stderr.setter
    def stderr(self, text: str) -> None:
        self._stderr = text


class SandboxExecutionError(StoppedError):
    """The sandbox broke (or was not started) while something was to run in it."""

    def __init__(
        self,
        message: str,
        sandbox_id: str | None = None,
        exit_code: int | None = None,
        stderr: str | Printed = "",
        *,
        stdout: str | Printed = "",
    ) -> None:
        super().__init__(message, sandbox_id, stdout=stdout, stderr=stderr)
        self.exit_code = exit_code


class ResourceLimitError(StoppedError):
    """A limit was reached. ``resource_type`` is memory, disk, pids, cpu or output."""

    def __init__(
        self,
        message: str,
        sandbox_id: str | None = None,
        resource_type: str | None = None,
        limit: float | None = None,
        usage: float | None = None,
        *,
        stdout: str | Printed = "",
        stderr: str | Printed = "",
    ) -> None:
        super().__init__(message, sandbox_id, stdout=stdout, stderr=stderr)
        self.resource_type = resource_type
        self.limit = limit
        self.usage = usage


class SandboxTimeoutError(StoppedError, TimeoutError):
    """The program did not end in time and was killed, with everything it had started."""

    def __init__(
        self,
        message: str,
        sandbox_id: str | None = None,
        timeout_seconds: float | None = None,
        *,
        stdout: str | Printed = "",
        stderr: str | Printed = "",
    ) -> None:
        super().__init__(message, sandbox_id, stdout=stdout, stderr=stderr)
        self.timeout_seconds = timeout_seconds


class SandboxCleanupError(SandboxError):
    """Something of a sandbox could not be removed; the message names it."""


class SandboxLimitError(SandboxError):
    """The manager has as many sandboxes as it may."""


class SandboxNotFoundError(SandboxError, KeyError):
    """No sandbox has that id."""


class SandboxConflictError(SandboxCreationError):
    """A sandbox with that id exists already."""


class SandboxFileError(SandboxError):
    """A file operation inside the sandbox failed. ``errno``, ``strerror`` and ``filename`` are what
    an OSError would say, or None where that is not known."""

    def __init__(
        self,
        message: str,
        sandbox_id: str | None = None,
        *,
        errno: int | None = None,
        filename: str | None = None,
    ) -> None:
        super().__init__(message, sandbox_id)
        self.errno = errno
        self.strerror = os.strerror(errno) if errno else None
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:
        # An OSError keeps these three elsewhere than in the dict.
        names = ("errno", "strerror", "filename")
        state = {**self.__dict__, **{name: getattr(self, name) for name in names}}
        return type(self), (self.message, self.sandbox_id), state


class SandboxFileNotFoundError(SandboxFileError, FileNotFoundError):
    """There is no such file inside the sandbox."""


class SandboxFileExistsError(SandboxFileError, FileExistsError):
    """Something of that name is there already."""


class SandboxIsADirectoryError(SandboxFileError, IsADirectoryError):
    """A file was expected, and the path is a directory."""


class SandboxNotADirectoryError(SandboxFileError, NotADirectoryError):
    """A directory was expected, and the path is something else."""


class SandboxPermissionError(SandboxFileError, PermissionError):
    """A program of the sandbox's user could not do this either."""


class SandboxFileDecodeError(SandboxFileError, UnicodeDecodeError):
    """The file is not text in the encoding that was asked for; ``start`` is the first byte that
    is not."""

    def __init__(
        self,
        message: str,
        sandbox_id: str | None = None,
        *,
        filename: str | None = None,
        encoding: str = "utf-8",
        start: int = 0,
        end: int = 0,
        reason: str = "",
    ) -> None:
        UnicodeDecodeError.__init__(self, encoding, b"", start, end, reason)
        SandboxFileError.__init__(self, message, sandbox_id, filename=filename)

    def __reduce__(self) -> tuple[Any, ...]:
        kind, given, state = super().__reduce__()
        names = ("encoding", "start", "end", "reason")
        return kind, given, {**state, **{name: getattr(self, name) for name in names}}


class SandboxPathError(SandboxFileError, ValueError):
    """The path leads to a place that is not the sandbox's own, or is not a path at all. ``path`` is
    it, if known."""

    def __init__(
        self, message: str, sandbox_id: str | None = None, *, path: str | None = None
    ) -> None:
        super().__init__(message, sandbox_id, filename=path)
        self.path = path


class InvalidValueError(ValueError):
    """A value that the caller gave cannot be used; the message says why. A plain ValueError is a
    fault of this package, which a service must not blame on its clients."""
