"""What a long command says while it works: a moving line for a person, plain lines for a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import output


@contextmanager
def progress(title: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    if quiet:
        yield lambda line: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        console = Console(stderr=True)
        with console.status(escape(title)) as status:
            room = max(20, console.width - 4)
            yield lambda line: status.update(escape(output.printable(f"{title}: {line}")[:room]))
    else:
        output.note(title)
        yield lambda line: output.note(f"  {line}")


def late_progress() -> Callable[[str], None] | None:
    """For what may have to be waited for before a program starts: each step in one line of a
    terminal, which is empty again before the program prints. Nothing for a log, which has been
    told already what is waited for."""
    if not sys.stderr.isatty():
        return None

    def show(step: str) -> None:
        room = max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 2)
        sys.stderr.write(f"\r\x1b[K{output.printable(step)[:room]}")
        sys.stderr.flush()

    return show
