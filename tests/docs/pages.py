"""Markdown, as far as the tests of the documentation need it: fenced blocks and sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^ *```(\w*)(.*)$")
_HEADING = re.compile(r"^(#{1,6}) +(.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is that of its first line of text, counted from 1."""

    page: str
    language: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, language: str) -> list[Block]:
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    held: list[str] = []
    for number, line in enumerate(_lines(page), 1):
        fence = _FENCE.match(line)
        if fence is None:
            held.append(line)
        elif opened is None:
            opened, held = (fence[1], number + 1), []
        else:
            found.append(Block(page, *opened, "\n".join(held) + "\n"))
            opened = None
    assert opened is None, f"{page}: a block is not closed"
    return [block for block in found if block.language == language]


def sections(page: str) -> dict[str, str]:
    """The text below each heading, up to the next heading of any depth; backticks left out."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    inside = False
    for line in _lines(page):
        inside ^= bool(_FENCE.match(line))
        heading = None if inside else _HEADING.match(line)
        if heading is None:
            current.append(line)
        else:
            current = found.setdefault(heading[2].replace("`", ""), [])
    return {title: "\n".join(lines) for title, lines in found.items()}


def code_words(text: str) -> set[str]:
    """Everything in backticks, and the first word of each: `--env NAME=VALUE` is --env too."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return {*spans, *(span.split()[0] for span in spans if span.strip())}


def _lines(page: str) -> list[str]:
    return (REPOSITORY / page).read_text(encoding="utf-8").splitlines()
