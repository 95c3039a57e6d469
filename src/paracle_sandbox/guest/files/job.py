"""Run a file operation in turns inside the guest's loop.

An operation is a generator. It yields to let the loop go on: True to be called again at once, False
to sleep until data or credit arrives. The job sends it each piece of data, and b"" at the end of
the data. The value that it returns becomes the RESULT. Its `finally` clauses close what it opened,
whether it ends, fails or is cancelled.
"""

import errno
from typing import Any, Callable, Dict, Generator, Optional, Protocol

from .archive import TreeError, TreePathError
from .paths import FileError, Location, Roots, to_file_error

MAX_OFFSET = 1 << 62

Message = Dict[str, Any]
Work = Generator[bool, Optional[bytes], Message]


class Wire(Protocol):
    """The part of `wire.Wire` that operations use."""

    credit: int

    def data(self, data: bytes) -> None: ...
    def event(self, value: Message) -> None: ...
    def result(self, value: Message) -> None: ...
    def error(self, code: str, message: str, errno: Optional[int] = None) -> None: ...
    def consumed(self, amount: int) -> None: ...


Operation = Callable[[Message, Wire, Roots], Work]


class Job:
    """One operation under way, with the methods that the loop calls."""

    def __init__(self, operation: Operation, request: Message, wire: Wire, roots: Roots) -> None:
        self.wants_turn = False
        self._request = request
        self._wire = wire
        self._roots = roots
        self._work: Optional[Work] = operation(request, wire, roots)

    def come_after(self, is_over: Callable[[], bool]) -> None:
        """Begin only when ``is_over`` returns True. It is asked again after each ``on_credit``."""
        if self._work is not None:
            self._work = _run_after(is_over, self._work)

    def start(self) -> None:
        """Run to the first pause. Small operations end before it."""
        self._step(None)

    def on_data(self, data: bytes) -> None:
        if data:
            self._step(data)

    def on_end(self) -> None:
        self._step(b"")

    def on_credit(self) -> None:
        self.wants_turn = self._work is not None

    def turn(self) -> None:
        self._step(None)

    def cancel(self) -> None:
        """End the operation and close what it opened, without a response."""
        self.wants_turn = False
        if self._work is not None:
            self._work.close()
            self._work = None

    def _step(self, value: Optional[bytes]) -> None:
        if self._work is None:
            return
        try:
            self.wants_turn = self._work.send(value)
        except StopIteration as end:
            self.cancel()
            self._wire.result(end.value)
        except FileError as error:
            self._fail(error)
        except TreePathError as error:
            self._fail(FileError("path_escape", "The tree was refused: %s" % error))
        except TreeError as error:
            self._fail(FileError("invalid", "The tree was refused: %s" % error))
        except OSError as error:
            self._fail(to_file_error(error, self._error_path()))

    def _fail(self, error: FileError) -> None:
        self.cancel()
        self._wire.error(error.code, error.message, error.number)

    def _error_path(self) -> str:
        """Return the path that an error is about. It was located before, so this cannot fail."""
        return self._roots.locate(self._request.get("path")).text


def _run_after(is_over: Callable[[], bool], work: Work) -> Work:
    while not is_over():
        yield False
    return (yield from work)


def read_number(request: Message, key: str, default: int) -> int:
    """Return a number of the request, which must not be negative. Raises FileError otherwise."""
    value = request.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 <= value <= MAX_OFFSET:
        raise FileError("invalid", "%s must be a whole number that is not negative" % key)
    return value


def too_large_error(location: Location, most: int) -> FileError:
    """Build the error for a file or tree that is larger than the host accepts."""
    text = "%s is larger than %d bytes" % (location.text, most)
    return FileError("too_large", text, errno.EFBIG)
