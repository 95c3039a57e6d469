"""Completion of commands, options and values by the TAB key of bash, zsh and fish.

The script of a shell asks this program with each TAB, by variables: ``_PARACLE_COMPLETE`` names
the shell and what is wanted of it, the others hold the line so far. Scripts that an older version
has installed have a name of another tool in them, and still work.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from .commands import ROOT
from .completion_scripts import SCRIPTS
from .exit_codes import FAILURE, SUCCESS, UsageFault
from .parser import Entry, Group

_MEANING = 60


def complete(env: Mapping[str, str]) -> int:
    """Answer what the script of a shell asks for."""
    wanted, _, shell = env["_PARACLE_COMPLETE"].partition("_")
    if shell not in SCRIPTS or wanted not in ("complete", "source"):
        raise UsageFault(f"_PARACLE_COMPLETE: known shells are {', '.join(SCRIPTS)}")
    if wanted == "source":
        print(SCRIPTS[shell], end="")
        return SUCCESS
    offered = offer(*_line(env, shell))
    if shell == "zsh":
        print(_for_zsh(offered))
    elif shell == "fish":
        asked = env.get("_PARACLE_COMPLETE_FOR") or env.get("_TYPER_COMPLETE_FISH_ACTION")
        if asked in ("condition", "is-args"):
            return SUCCESS if offered else FAILURE
        print("\n".join(f"{word}\t{meaning}".rstrip() for word, meaning in offered))
    else:
        print("\n".join(word for word, _ in offered))
    return SUCCESS


def offer(words: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Find what the incomplete word may become behind these, each with its meaning."""
    node: Group | Entry = ROOT
    name, rest = "paracle", words
    while isinstance(node, Group) and rest and rest[0] in node.commands:
        name, node, rest = f"{name} {rest[0]}", node.commands[rest[0]], rest[1:]
    if isinstance(node, Entry) or incomplete[:1] == "-":
        found = node.build(name).complete_words(rest, incomplete)
    elif rest:
        found = []
    else:
        found = [(one, entry.summary) for one, entry in node.commands.items()]
    return [(word, _cut(meaning)) for word, meaning in found if word.startswith(incomplete)]


def _line(env: Mapping[str, str], shell: str) -> tuple[list[str], str]:
    """The words before the one to complete, without the program's name, and that word."""
    if shell == "bash":
        words = _split(env.get("COMP_WORDS", ""))
        at = int(env.get("COMP_CWORD") or len(words))
        return words[1:at], words[at] if at < len(words) else ""
    line = env.get("_PARACLE_COMPLETE_LINE") or env.get("_TYPER_COMPLETE_ARGS", "")
    words = _split(line)
    is_begun = bool(words) and not line[-1:].isspace()
    return (words[1:-1], words[-1]) if is_begun else (words[1:], "")


def _split(line: str) -> list[str]:
    """Split as the shell would; a quotation that is still open counts as far as it goes."""
    reader = shlex.shlex(line, posix=True)
    reader.whitespace_split = True
    reader.commenters = ""
    words = []
    try:
        for word in reader:
            words.append(word)
    except ValueError:
        words.append(reader.token)
    return words


def _cut(meaning: str) -> str:
    return meaning if len(meaning) <= _MEANING else f"{meaning[: _MEANING - 3]}..."


def _for_zsh(offered: list[tuple[str, str]]) -> str:
    if not offered:
        return "_files"
    words = "\n".join(
        f'"{_quoted(word)}":"{_quoted(meaning)}"' if meaning else f'"{_quoted(word)}"'
        for word, meaning in offered
    )
    return f"_arguments '*: :(({words}))'"


def _quoted(text: str) -> str:
    """For a word in double quotes inside single ones, of which a colon would end the first part."""
    for letter, safe in (
        ("'", "''"), ('"', '""'), ("$", "\\$"), ("`", "\\`"), (":", "\\\\:"),
    ):  # fmt: skip
        text = text.replace(letter, safe)
    return text
