"""Parses agent files: Markdown with front matter, and the part of YAML that they need.

A key has a text, a number, a list, or a block of text (``|``). Anything else is refused with its
line. Agent files are small, and a full YAML parser does more than is safe.
"""

from __future__ import annotations

from ..errors import SandboxError

Value = str | list[str]


def read_markdown(text: str, name: str) -> tuple[dict[str, Value], str]:
    """Return the keys between the ``---`` lines, and the text below them."""
    lines = text.replace("\r\n", "\n").lstrip("\ufeff").split("\n")
    if not lines or lines[0].strip() != "---":
        return {}, text
    for number, line in enumerate(lines[1:], 1):
        if line.strip() == "---":
            keys = read_yaml("\n".join(lines[1:number]), name)
            return keys, "\n".join(lines[number + 1 :]).strip()
    raise SandboxError(f"{name}: the front matter has no closing ---")


def read_yaml(text: str, name: str) -> dict[str, Value]:
    """Return the keys of a file. Raises SandboxError that names the file and the line."""
    found: dict[str, Value] = {}
    lines = text.replace("\r\n", "\n").split("\n")
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        key, colon, rest = line.partition(":")
        if not colon or line[0].isspace() or not key.replace("_", "").replace("-", "").isalnum():
            raise SandboxError(f"{name}, line {position}: expected 'key: value', not {line!r}")
        rest = _strip_comment(rest.strip())
        block: list[str] = []
        while position < len(lines) and _is_continuation(lines[position], rest):
            block.append(lines[position])
            position += 1
        found[key.strip()] = _parse_value(rest, block, f"{name}, line {position}")
    return found


def _is_continuation(line: str, rest: str) -> bool:
    """Whether a line continues the value of the key above it."""
    return not line or line[0].isspace() or (not rest and line.startswith("-"))


def _parse_value(rest: str, block: list[str], where: str) -> Value:
    if rest in ("|", "|-", ">", ">-"):
        return _join_block(block, folded=rest.startswith(">"))
    content = [line for line in block if line.strip()]
    if not rest and content:
        if not all(line.strip().startswith("- ") for line in content):
            raise SandboxError(f"{where}: each line of a list must begin with '- '")
        return [_strip_quotes(_strip_comment(line.strip()[2:].strip())) for line in content]
    if content:
        raise SandboxError(f"{where}: for a text of several lines write '|' after the key")
    if rest.startswith("[") and rest.endswith("]"):
        return [_strip_quotes(part.strip()) for part in rest[1:-1].split(",") if part.strip()]
    if rest[:1] in ("{", "&", "*", "!"):
        raise SandboxError(f"{where}: {rest[:20]!r} is more YAML than an agent file needs")
    return _strip_quotes(rest)


def _join_block(block: list[str], *, folded: bool) -> str:
    filled = [line for line in block if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in filled), default=0)
    lines = [line[indent:] for line in block]
    return (" " if folded else "\n").join(lines).strip()


def _strip_quotes(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _strip_comment(text: str) -> str:
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        return text[: end + 1] if end > 0 else text
    return text.partition(" #")[0].strip()
