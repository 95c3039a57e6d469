"""This module lends the user's terminal to a program inside.

What is typed reaches the program key by key, Ctrl-C included, and its output steers this
terminal. Ctrl-] three times within a second ends the command, for programs that do not end on
anything else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from types import TracebackType
from typing import TYPE_CHECKING, Self

from . import exit_codes

if TYPE_CHECKING:
    from ..sandbox.command import Command

_USUAL_SIZE = (24, 80)
_ESCAPE = 0x1D  # Ctrl-]
_TIMES = 3
_ESCAPE_SECONDS = 1.0


class OwnTerminal:
    """``with`` it: raw inside the block where stdin is a terminal, and as it was afterwards,
    however the command ends."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor if descriptor is not None and os.isatty(descriptor) else None
        self._before: list[object] | None = None
        self._typed: list[float] = []

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the terminal that shows the output, else of the usual one."""
        for descriptor in (sys.stdout.fileno(), self._descriptor):
            if descriptor is not None and os.isatty(descriptor):
                columns, rows = os.get_terminal_size(descriptor)
                if rows and columns:
                    return rows, columns
        return _USUAL_SIZE

    def __enter__(self) -> Self:
        if self._descriptor is not None:
            self._before = list(termios.tcgetattr(self._descriptor))
            exit_codes.before_leaving.append(self.restore)
            tty.setraw(self._descriptor, termios.TCSADRAIN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        before, self._before = self._before, None
        if before is not None and self._descriptor is not None:
            exit_codes.before_leaving.remove(self.restore)
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)  # type: ignore[arg-type]

    def follow_size(self, command: Command) -> None:
        """Tell the program each time the user's window changes its size."""
        loop = asyncio.get_running_loop()
        waiting: set[asyncio.Task[None]] = set()

        def changed() -> None:
            task = loop.create_task(command.resize(*self.size))
            waiting.add(task)
            task.add_done_callback(waiting.discard)

        loop.add_signal_handler(signal.SIGWINCH, changed)

    def watch(self, typed: bytes) -> bool:
        """Return whether these keys were for us and not for the program."""
        if self._before is None:
            return False
        for key in typed:
            self._typed = [*self._typed, time.monotonic()] if key == _ESCAPE else []
            if len(self._typed) < _TIMES:
                continue
            if self._typed[-1] - self._typed[-_TIMES] <= _ESCAPE_SECONDS:
                os.kill(os.getpid(), signal.SIGINT)
                return True
        return False
