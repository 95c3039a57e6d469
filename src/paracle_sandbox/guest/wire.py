"""The guest's end of the channel, and one stream of it as a job sees it.

Small frames wait for the end of the loop's turn and are sent in one write. Large frames are sent at
once, and are not copied unless the channel is full. While the channel is full, Wire.credit is 0, so
jobs produce no more and the queue stays bounded.
"""

import errno
import fcntl
import os
import termios
from collections import deque
from itertools import islice
from typing import Any, Callable, Deque, Dict, Iterator, Optional, Tuple, Union

from ..channel import frames
from .loop import READ, WRITE, Loop

Buffer = Union[bytes, memoryview]

DIRECT_BYTES = 32 << 10
MAX_VECTORS = 64
# A larger buffer would be mapped and unmapped for each read, so it is used only after a large read.
SMALL_READ_BYTES = 8 << 10
_NOTHING = bytes(4)
# A host may send requests and not read the responses. When so much waits for it, we stop reading.
MAX_QUEUED_BYTES = 4 << 20

ERRNO_CODES = {
    errno.ENOENT: "not_found",
    errno.EEXIST: "exists",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "not_directory",
    errno.ENOTEMPTY: "not_empty",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "too_large",
    errno.ENAMETOOLONG: "invalid",
    errno.ELOOP: "invalid",
}


class ChannelClosed(Exception):
    """The channel has ended, so the host has gone or closed the sandbox."""


class Channel:
    """Send and receive frames over non-blocking descriptors."""

    def __init__(self, loop: Loop, read_fd: int, write_fd: int) -> None:
        self._loop = loop
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._reader = frames.FrameReader(frames.TO_GUEST)
        self._queue: Deque[Buffer] = deque()
        self._queued_bytes = 0
        self._read_bytes = SMALL_READ_BYTES
        self._on_readable: Callable[[], None] = _nothing
        self._on_drained: Callable[[], None] = _nothing
        self.congested = False

    def open(self, on_readable: Callable[[], None], on_drained: Callable[[], None]) -> None:
        """Begin to watch the channel. ``on_drained`` is called when it is no longer congested."""
        self._on_readable = on_readable
        self._on_drained = on_drained
        self._loop.watch(self._read_fd, READ, on_readable)

    def receive(self) -> Iterator[Tuple[int, int, bytes]]:
        """Read once, and return the frames that are whole now.

        Raises ChannelClosed, ProtocolError.
        """
        try:
            data = os.read(self._read_fd, self._read_bytes)
        except BlockingIOError:
            return iter(())
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("end of file")
        self._read_bytes = frames.CHUNK if len(data) >= SMALL_READ_BYTES else SMALL_READ_BYTES
        return self._reader.feed(data)

    def send(self, kind: int, stream: int, payload: Buffer = b"") -> None:
        """Queue one frame. The caller may reuse the memory of a memoryview afterwards."""
        size = len(payload)
        self._queue.append(frames.HEADER.pack(kind, stream, size))
        self._queued_bytes += frames.HEADER.size + size
        if self.congested and self._queued_bytes > MAX_QUEUED_BYTES:
            self._loop.unwatch(self._read_fd)
        if size < DIRECT_BYTES:
            self._queue.append(bytes(payload))
            return
        self._queue.append(payload)
        self.flush()
        if self._queue and isinstance(payload, memoryview):
            self._queue[-1] = bytes(self._queue[-1])

    def send_json(self, kind: int, stream: int, value: Dict[str, Any]) -> None:
        """Queue one frame with a JSON payload."""
        self.send(kind, stream, _json(value))

    def flush(self) -> None:
        """Write as many queued frames as the channel accepts now. Raises ChannelClosed."""
        if self.congested:
            return
        try:
            while self._queue:
                self._forget(os.writev(self._write_fd, list(islice(self._queue, MAX_VECTORS))))
        except BlockingIOError:
            self.congested = True
            self._loop.watch(self._write_fd, WRITE, self._writable)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    @property
    def unread(self) -> bool:
        """Whether the host has not read all that was sent.

        It is False for pipes, which cannot tell.
        """
        try:
            return fcntl.ioctl(self._write_fd, termios.TIOCOUTQ, _NOTHING) != _NOTHING
        except OSError:
            return False

    def _writable(self) -> None:
        self.congested = False
        self._loop.unwatch(self._write_fd)
        self.flush()
        if not self.congested:
            self._loop.watch(self._read_fd, READ, self._on_readable)
            self._on_drained()

    def _forget(self, written: int) -> None:
        self._queued_bytes -= written
        while self._queue and written >= len(self._queue[0]):
            written -= len(self._queue.popleft())
        if written:
            self._queue[0] = memoryview(self._queue[0])[written:]


class Wire:
    """One stream, as the job that serves it sees it. It keeps account of the stream's credit."""

    def __init__(self, channel: Channel, stream: int, on_finished: Callable[[int], None]) -> None:
        self.number = stream
        self._channel = channel
        self._on_finished = on_finished
        self._window = frames.WINDOW
        self._receivable = frames.WINDOW
        self._unreported = 0
        self.finished = False

    @property
    def credit(self) -> int:
        """The number of bytes that the job may send now."""
        return 0 if self._channel.congested or self.finished else max(0, self._window)

    @property
    def exhausted(self) -> bool:
        """Whether the host has to send CREDIT before the job may send more."""
        return self._window <= 0

    def grant(self, amount: int) -> None:
        """Account for CREDIT from the host."""
        self._window += amount

    def received(self, amount: int) -> None:
        """Account for DATA from the host. Raises ProtocolError if it exceeds the window."""
        self._receivable -= amount
        if self._receivable < 0:
            raise frames.ProtocolError("more data than the window allows")

    def consumed(self, amount: int) -> None:
        """Let the host send this much more. CREDIT is sent when enough has come together."""
        self._unreported += amount
        if self._unreported >= frames.WINDOW // 4 and not self.finished:
            self._receivable += self._unreported
            self._channel.send(frames.CREDIT, self.number, self._unreported.to_bytes(4, "big"))
            self._unreported = 0

    def data(self, content: Buffer) -> None:
        """Send DATA."""
        self.output(frames.DATA, content)

    def output(self, kind: int, content: Buffer) -> None:
        """Send DATA or STDERR, in as many frames as are needed."""
        for start in range(0, len(content), frames.MAX_PAYLOAD):
            self._send_credited(kind, content[start : start + frames.MAX_PAYLOAD])

    def event(self, value: Dict[str, Any]) -> None:
        """Send an EVENT."""
        self._send_credited(frames.EVENT, _json(value))

    def result(self, value: Dict[str, Any]) -> None:
        """End the stream with a RESULT. Once the stream has ended, nothing more is sent."""
        self._finish(frames.RESULT, value)

    def error(
        self, code: str, message: str, errno: Optional[int] = None, nothing_runs: bool = False
    ) -> None:
        """End the stream with an ERROR.

        ``nothing_runs`` says of a command that no process which it started is left.
        """
        value: Dict[str, Any] = {"code": code, "message": message}
        if errno is not None:
            value["errno"] = errno
        if nothing_runs:
            value["nothing_runs"] = True
        self._finish(frames.ERROR, value)

    def os_error(self, error: OSError, message: str) -> None:
        """End the stream with the ERROR for an OSError."""
        self.error(*os_failure(error, message))

    def _send_credited(self, kind: int, payload: Buffer) -> None:
        if not self.finished:
            self._window -= len(payload)
            self._channel.send(kind, self.number, payload)

    def _finish(self, kind: int, value: Dict[str, Any]) -> None:
        if self.finished:
            return
        self._channel.send_json(kind, self.number, value)
        self.finished = True
        self._on_finished(self.number)


def os_failure(error: OSError, message: str) -> Tuple[str, str, Optional[int]]:
    """Return the arguments of `Wire.error` for an OSError."""
    code = ERRNO_CODES.get(error.errno or 0, "internal")
    return code, "%s: %s" % (message, error.strerror), error.errno


def _json(value: Dict[str, Any]) -> bytes:
    return frames.check_size(frames.to_json(value))


def _nothing() -> None:
    pass
