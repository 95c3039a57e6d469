"""This module prints lines, tables and JSON for the command line; no program can forge them.

Text that comes from inside a sandbox may hold terminal control sequences; everything shown to
a person goes through ``printable``. rich is only imported when a table is drawn.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TextIO

from .environment import allows_colour

# C0 without tab and newline, DEL, C1, and the characters that reorder text on the screen.
_FORBIDDEN = [*range(9), *range(11, 32), *range(127, 160), 0x200E, 0x200F, 0x2028, 0x2029,
              *range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # fmt: skip
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _FORBIDDEN}
_ESCAPES[0x0D] = "\\r"
_COLOURS = {"green": "32", "yellow": "33", "bold green": "1;32", "bold red": "1;31"}


def printable(text: str) -> str:
    """Escape what would steer a terminal. Line feeds, tabs and letters of every script stay."""
    return text.replace("\r\n", "\n").translate(_ESCAPES)


def never_fail_on_a_letter() -> None:
    """Print a question mark for a letter that the locale lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def say(text: str = "") -> None:
    print(printable(text))


def say_in(colour: str, text: str) -> None:
    """Print a line, on a terminal in a colour. It is never cut, so that it can be copied."""
    if sys.stdout.isatty() and allows_colour():
        print(f"\x1b[{_COLOURS[colour]}m{printable(text)}\x1b[0m")
    else:
        say(text)


def note(text: str) -> None:
    """Print a line that is not part of the result to stderr, whether or not it can be read."""
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr)


def notes(rows: Sequence[Sequence[str]]) -> None:
    """Print a small table to stderr."""
    for line in plain_columns(rows):
        note(line)


def complain(message: str) -> None:
    note(f"Error: {' '.join(message.split())}")


def say_json(document: object) -> None:
    print(as_json(document))


def as_json(document: object) -> str:
    import json

    return json.dumps(document, indent=2)


def tick(yes: bool) -> str:
    return "✓" if yes else "✗"


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None
) -> None:
    """Draw a table on a terminal; elsewhere print plain columns that cut and awk understand."""
    out = sys.stdout if file is None else file
    cells = [[_one_line(cell) for cell in row] for row in rows]
    if out.isatty():
        _rich_table(title, columns, cells, out)
        return
    if title:
        print(title, file=out)
    for line in plain_columns([list(columns), *cells] if any(columns) else cells):
        print(line, file=out)


def plain_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _one_line(cell: str) -> str:
    return printable(" ".join(cell.split()))


def _rich_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title or None, show_header=any(columns), title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(column, no_wrap=number == 0)
    for row in rows:
        # Text, because rich would read [brackets] in a plain str as markup.
        shown.add_row(*(Text(cell) for cell in row))
    Console(file=out, highlight=False).print(shown)
