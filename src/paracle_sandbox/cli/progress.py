"""Show how far a long command is: in one changing line of a terminal, else in plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import output


@contextmanager
def progress(title: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a step of the work; the line is empty again after the block."""
    if quiet:
        yield lambda step: None
    elif sys.stderr.isatty():
        _show_line(title)
        try:
            yield lambda step: _show_line(f"{title}: {step}")
        finally:
            _show_line("")
    else:
        output.note(title)
        yield lambda step: output.note(f"  {step}")


def late_progress() -> Callable[[str], None] | None:
    """Return what shows steps that a program may have to wait for before it starts. The terminal's
    line is empty again before the program prints. A log has been told already what is waited for:
    for it the answer is None."""
    return _show_line if sys.stderr.isatty() else None


def _show_line(text: str) -> None:
    """Replace the terminal's current line, cut to its width."""
    room = max(20, (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 2)
    sys.stderr.write(f"\r\x1b[K{output.printable(' '.join(text.split()))[:room]}")
    sys.stderr.flush()
