"""Show ``--help``: within 80 columns, in groups, and in colour on a terminal."""

from __future__ import annotations

import textwrap
from argparse import Action
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from .environment import allows_colour
from .parser import HELP, HELP_TEXT, Argument, Command, Group

_WIDTH = 80
_LEFT = 30  # the widest column of options

Row = tuple[str, str]


def show_help(command: Command, group: Group | None, out: TextIO) -> None:
    """Print the help of a command; for a group of commands, ``command`` has its own options."""
    has_colour = out.isatty() and allows_colour()
    print("\n".join(help_lines(command, group, _bold if has_colour else str)), file=out)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def help_lines(
    command: Command, group: Group | None, bold: Callable[[str], str] = str
) -> Iterator[str]:
    words = ["COMMAND", "[ARGS]..."] if group else [one.usage for one in command.arguments]
    yield f"{bold('Usage:')} {' '.join([command.prog, '[OPTIONS]', *words])}"
    yield ""
    yield from _described(command.text)
    for heading, rows in _tables(command, group):
        yield ""
        yield bold(f"{heading}:")
        yield from _table(rows, bold)


def _tables(command: Command, group: Group | None) -> Iterator[tuple[str, list[Row]]]:
    if command.arguments:
        yield "Arguments", [(one.metavar, _meaning(one)) for one in command.arguments]
    tables: dict[str, list[Row]] = {}
    for name, entry in group.commands.items() if group else ():
        tables.setdefault(entry.heading, []).append((name, entry.summary))
    for heading, actions in command.sections.items():
        tables[heading] = [(_typed(one), one.help or "") for one in actions]
    last = [*command.sections][-1] if command.sections else "Options"
    tables.setdefault(last, []).append((", ".join(HELP), HELP_TEXT))
    yield from tables.items()


def _meaning(argument: Argument) -> str:
    default = "" if argument.default is None else f" [default: {argument.default}]"
    return f"{argument.help}{default}"


def _typed(action: Action) -> str:
    flags = ", ".join(action.option_strings)
    return f"{flags} {action.metavar}" if action.metavar else flags


def _described(text: str) -> Iterator[str]:
    """Paragraphs are wrapped; one that has an indented line is shown as it is."""
    for number, paragraph in enumerate(textwrap.dedent(text).strip().split("\n\n")):
        if number:
            yield ""
        if "\n  " in paragraph:
            yield from (f"  {line}".rstrip() for line in paragraph.split("\n"))
        else:
            yield from textwrap.wrap(
                " ".join(paragraph.split()), _WIDTH, initial_indent="  ", subsequent_indent="  "
            )


def _table(rows: Sequence[Row], bold: Callable[[str], str]) -> Iterator[str]:
    width = max((len(left) for left, _ in rows if len(left) <= _LEFT), default=_LEFT)
    for left, right in rows:
        told = textwrap.wrap(right, _WIDTH - width - 4, break_on_hyphens=False) or [""]
        if len(left) > width:
            yield f"  {bold(left)}"
        else:
            yield f"  {bold(left)}{' ' * (width - len(left))}  {told.pop(0)}".rstrip()
        yield from (f"{' ' * (width + 4)}{line}" for line in told)
