"""This module joins the program's streams with ours: its output as it comes, our input to it.

Nothing here may block the event loop, on which the deadline and Ctrl-C depend. A write that
could wait (a pager that is not scrolled) and a read that could (a pipe without a writer)
happen in daemon threads, which do not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .output import printable

if TYPE_CHECKING:
    from ..sandbox.command import Command

_CHUNK = 1 << 16
_CTRL_D = b"\x04"
_CTRL_D_SECONDS = 0.1


class Outlet:
    """One stream of ours. Bytes pass unchanged, except to a terminal: that one is shown text
    with every control sequence escaped, unless the user asked for them raw."""

    def __init__(self, descriptor: int, raw: bool = False) -> None:
        self._descriptor = descriptor
        self._escape = not raw and os.isatty(descriptor)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._last = b"\n"
        self._given_up = False

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Write the data; if that could take long, it is done when the answer was awaited. Raises
        BrokenPipeError when the reader has gone."""
        if self._given_up:
            return None
        self._last = data[-1:] or self._last
        if self._escape:
            data = printable(self._decoder.decode(data)).encode()
        if self._is_file or self._takes(len(data)):
            _write_all(self._descriptor, data)
            return None
        return self._write_slowly(data)

    async def _write_slowly(self, data: bytes) -> None:
        try:
            await _in_thread(lambda: _write_all(self._descriptor, data))
        except asyncio.CancelledError:
            # The program is being stopped while its reader waits: the rest would wait here too.
            self._given_up = True
            raise

    def end_line(self) -> None:
        """Begin a new line on a terminal, for what we say next."""
        if self._last != b"\n" and not self._given_up and os.isatty(self._descriptor):
            _write_all(self._descriptor, b"\n")

    def _takes(self, size: int) -> bool:
        """Return whether so much can be written without waiting."""
        if not hasattr(select, "poll") or size > select.PIPE_BUF:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(0))


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


async def _in_thread(work: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except OSError as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, daemon=True).start()
    await done


class Outlets:
    """Our stdout and stderr, as the program's."""

    def __init__(self, raw: bool) -> None:
        self._outlets = {
            name: Outlet(stream.fileno(), raw)
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))
        }

    def __call__(self, name: str, data: bytes) -> Awaitable[None] | None:
        return self._outlets[name].write(data)

    def end_line(self) -> None:
        for outlet in self._outlets.values():
            outlet.end_line()


def own_stdin() -> int | None:
    """Return the stdin that the program gets: ours, unless it is closed, or a terminal that another
    job of its shell uses now. To read from such a terminal would stop this process."""
    if sys.stdin is None or sys.stdin.closed:
        return None
    try:
        descriptor = sys.stdin.fileno()
    except OSError:
        return None
    if os.isatty(descriptor) and not _in_foreground(descriptor):
        return None
    return descriptor


def _in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True  # it is no terminal that controls this process, and so stops nothing


def feed(command: Command, descriptor: int, watch: Callable[[bytes], bool] | None = None) -> None:
    """Pass on what comes, at the pace at which the program reads. ``watch`` sees each piece first
    and can keep it from the program by returning True; it is given for one that has a terminal."""
    loop = asyncio.get_running_loop()
    threading.Thread(target=_feed, args=(loop, command, descriptor, watch), daemon=True).start()


def _feed(
    loop: asyncio.AbstractEventLoop,
    command: Command,
    descriptor: int,
    watch: Callable[[bytes], bool] | None,
) -> None:
    def write(data: bytes) -> None:
        asyncio.run_coroutine_threadsafe(command.write_stdin(data), loop).result()

    try:
        while chunk := _read(descriptor):
            if watch is None or not watch(chunk):
                write(chunk)
        while watch is not None:
            # The program's terminal stays open: Ctrl-D says that nothing more is typed, to each
            # that reads. One that comes before the program is ready for it is lost.
            write(_CTRL_D)
            time.sleep(_CTRL_D_SECONDS)
        asyncio.run_coroutine_threadsafe(command.close_stdin(), loop).result()
    except (OSError, RuntimeError, asyncio.CancelledError):
        pass  # the program, or the loop, has ended: the rest is not wanted


def _read(descriptor: int) -> bytes:
    """Read a piece; a terminal that can no longer be read counts as ended."""
    try:
        return os.read(descriptor, _CHUNK)
    except OSError:
        return b""
