"""How a file operation runs inside the guest's loop.

An operation is a generator. It yields to let the loop go on: True to be called again at once,
False to sleep until data or credit arrives. It is sent each piece of data, and b"" at the end
of the data; what it returns is the RESULT. Its `finally` clauses close what it opened, whether
it ends, fails or is cancelled. One that has to come after something else sleeps until then.
"""

import errno
from typing import Any, Callable, Dict, Generator, Optional, Protocol

from .archive import TreeError, TreePathError
from .paths import FileError, Place, Roots, explain

MAX_OFFSET = 1 << 62

Message = Dict[str, Any]
Work = Generator[bool, Optional[bytes], Message]


class Wire(Protocol):
    """The stream of one operation, as the guest's loop provides it."""

    credit: int

    def data(self, data: bytes) -> None: ...
    def event(self, value: Message) -> None: ...
    def result(self, value: Message) -> None: ...
    def error(self, code: str, message: str, errno: Optional[int] = None) -> None: ...
    def consumed(self, amount: int) -> None: ...


Operation = Callable[[Message, Wire, Roots], Work]


class Job:
    """One operation under way, as the loop drives it."""

    def __init__(self, operation: Operation, request: Message, wire: Wire, roots: Roots) -> None:
        self.wants_turn = False
        self._request = request
        self._wire = wire
        self._roots = roots
        self._work: Optional[Work] = operation(request, wire, roots)

    def come_after(self, is_over: Callable[[], bool]) -> None:
        """Do nothing before it is; ``on_credit`` has it asked again."""
        if self._work is not None:
            self._work = _after(is_over, self._work)

    def start(self) -> None:
        """Runs to the first pause; small operations are over then."""
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
        """Ends the work and closes everything, without an answer."""
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
            self._fail(FileError("path_escape", "Refused: %s" % error))
        except TreeError as error:
            self._fail(FileError("invalid", "Refused: %s" % error))
        except OSError as error:
            self._fail(explain(error, self._path()))

    def _fail(self, error: FileError) -> None:
        self.cancel()
        self._wire.error(error.code, error.message, error.number)

    def _path(self) -> str:
        """The path that an error is about; only asked for after it was located once."""
        return self._roots.locate(self._request.get("path")).text


def _after(is_over: Callable[[], bool], work: Work) -> Work:
    while not is_over():
        yield False
    return (yield from work)


def number_of(request: Message, key: str, default: int) -> int:
    """A number of a request that is not negative. FileError when it is something else."""
    value = request.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 <= value <= MAX_OFFSET:
        raise FileError("invalid", "%s must be a number that is not negative" % key)
    return value


def too_large(place: Place, most: int) -> FileError:
    text = "%s is larger than %d bytes" % (place.text, most)
    return FileError("too_large", text, errno.EFBIG)
