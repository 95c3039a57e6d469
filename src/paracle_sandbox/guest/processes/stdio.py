"""The guest's ends of a command's standard streams: pipes, or the master of a terminal."""

import errno
import fcntl
import os
import struct
import termios
from collections import deque
from typing import Deque, Optional, Tuple

from ...channel import frames
from ..loop import READ, WRITE, Loop
from ..request import Size
from ..wire import Wire

PIPE_BYTES = 1 << 20
DEFAULT_PIPE_BYTES = 64 << 10
# This is more than a terminal holds, so its last output is complete even if a process goes on
# writing.
TERMINAL_TAIL_BYTES = 256 << 10
END_OF_FILE = b"\x04"


class Output:
    """The output of a command, which is read only as fast as the host consumes it."""

    def __init__(self, loop: Loop, fd: int, kind: int, wire: Wire, buffer: memoryview) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._kind = kind
        self._wire = wire
        self._buffer = buffer
        self._watched = False
        self._enlarged = False
        self._left: Optional[int] = None  # known once the command has ended
        self.closed = False

    def update(self) -> None:
        """Watch the output while the host has credit for it, and stop otherwise."""
        wanted = not self.closed and self._left is None and self._wire.credit > 0
        if wanted != self._watched:
            self._watched = wanted
            if wanted:
                self._loop.watch(self._fd, READ, self._ready)
            else:
                self._loop.unwatch(self._fd)

    def _ready(self) -> None:
        self._move()
        self.update()

    def settle(self) -> None:
        """Fix how much is still sent, because the command has ended.

        A background process may hold the other end and write for ever.
        """
        if self.closed or self._left is not None:
            return
        self._left = self.waiting()
        if os.isatty(self._fd):
            self._left = TERMINAL_TAIL_BYTES
        self.update()
        if not self._left:
            self.close()

    def waiting(self) -> int:
        """Return how many bytes the command has written that were not read."""
        try:
            answer = fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4))
        except OSError:
            return 0
        return int(struct.unpack("i", answer)[0])

    def drain(self) -> None:
        """Send the rest as far as the host has credit, and close when it is sent."""
        while not self.closed and self._wire.credit > 0:
            self._move()

    def close(self) -> None:
        """Close the guest's end. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self.update()
            os.close(self._fd)

    def _move(self) -> None:
        room = min(frames.CHUNK, self._wire.credit)
        if self._left is not None:
            room = min(room, self._left)
        if self.closed or room <= 0:
            return
        try:
            count = os.readv(self._fd, [self._buffer[:room]])
        except BlockingIOError:
            if self._left is not None:
                self.close()
            return
        except OSError:
            count = 0  # EIO: no process has the terminal open any more
        if count == 0:
            self.close()
            return
        self._wire.output(self._kind, self._buffer[:count])
        if self._left is None:
            self._enlarge(count)
            return
        self._left -= count
        if self._left == 0:
            self.close()

    def _enlarge(self, count: int) -> None:
        # Only a pipe that was full is enlarged, because the pipe memory of a user is limited.
        if count < DEFAULT_PIPE_BYTES or self._enlarged:
            return
        self._enlarged = True
        try:
            fcntl.fcntl(self._fd, 1031, PIPE_BYTES)  # F_SETPIPE_SZ, named since Python 3.10
        except OSError:
            pass  # slower, not wrong


class Input:
    """The input of a command.

    It waits here while the command does not read; the window bounds it.
    """

    def __init__(self, loop: Loop, fd: int, wire: Wire, terminal: bool) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._wire = wire
        self._terminal = terminal
        self._queue: Deque[memoryview] = deque()
        self._ended = False
        self._closed = False

    def write(self, data: bytes) -> None:
        """Queue data for the command. After its end it is dropped."""
        if self._ended or self._closed:
            self._wire.consumed(len(data))
            return
        self._queue.append(memoryview(data))
        self._flush()

    def end(self) -> None:
        """Let the command see the end of its input once it has read all of it."""
        if self._ended:
            return
        self._ended = True
        if self._terminal and not self._closed:
            self._queue.append(memoryview(END_OF_FILE))
        self._flush()

    def resize(self, size: Size) -> None:
        """Set the size of the terminal, if it is one."""
        if self._terminal and not self._closed:
            set_size(self._fd, size)

    def close(self) -> None:
        """Close the guest's end and drop what is queued. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._wire.consumed(sum(len(item) for item in self._queue))
            self._queue.clear()

    def _flush(self) -> None:
        try:
            while self._queue and not self._closed:
                count = os.write(self._fd, self._queue[0])
                self._wire.consumed(count)
                if count == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = self._queue[0][count:]
        except BlockingIOError:
            self._loop.watch(self._fd, WRITE, self._flush)
            return
        except OSError:
            self.close()  # the command has closed its end
            return
        self._drained()

    def _drained(self) -> None:
        if self._closed:
            return
        self._loop.unwatch(self._fd)
        if self._ended and not self._terminal:
            self.close()


def open_terminal() -> Tuple[int, int]:
    """Open a terminal and return its master and its slave. Raises OSError."""
    try:
        return os.openpty()
    except OSError as error:
        if error.errno != errno.ENOSPC:  # ENOSPC would be taken for a full disk
            raise
        raise OSError(errno.EMFILE, "no terminal is left") from error


def set_size(fd: int, size: Size) -> None:
    """Set the size of a terminal."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))
