r"""Paths with names that are not UTF-8, as text that JSON and addresses carry.

A file's name is bytes. Where they are no UTF-8 the path is shown escaped: each byte that does not
fit as ``\xff``, each backslash as two, and ``escaped`` beside it is true. A request that sends the
path back with ``escaped=true`` means the same file. All other paths are shown as they are.
"""

from __future__ import annotations

import re

from .errors import BadRequest

_ODD = re.compile("[\udc80-\udcff\\\\]")
_ESCAPE = re.compile(r"\\(?:x([89a-f][0-9a-f])|(\\)|)")


def is_odd(path: str) -> bool:
    """Whether it has bytes that are no UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return True
    return False


def escaped(path: str) -> str:
    return _ODD.sub(lambda found: _escape(found[0]), path)


def _escape(letter: str) -> str:
    return "\\\\" if letter == "\\" else f"\\x{ord(letter) - 0xDC00:02x}"


def shown(path: str) -> str:
    """Escaped if need be."""
    return escaped(path) if is_odd(path) else path


def unescaped(text: str) -> str:
    """Raises BadRequest."""
    path = _ESCAPE.sub(_byte, text)
    # What was a letter in two pieces is one again: the same bytes, read as a whole.
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def _byte(found: re.Match[str]) -> str:
    if found[1]:
        return chr(0xDC00 + int(found[1], 16))
    if found[2]:
        return "\\"
    raise BadRequest(r"An escaped path has \x80 to \xff for bytes, and \\ for a backslash")
