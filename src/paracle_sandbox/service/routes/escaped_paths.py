r"""Paths with names that are not UTF-8, as text that JSON and addresses can carry.

The name of a file is bytes. A path that is not UTF-8 is shown escaped: each byte that does not fit
as ``\xff``, each backslash as two, and the field ``escaped`` is true. A request that sends such a
path back with ``escaped=true`` means the same file. All other paths are shown unchanged.
"""

from __future__ import annotations

import re

from ..errors import BadRequest

_ODD = re.compile("[\udc80-\udcff\\\\]")
_ESCAPE = re.compile(r"\\(?:x([89a-f][0-9a-f])|(\\)|)")


def is_odd(path: str) -> bool:
    """Whether the path has bytes that are not UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return True
    return False


def escape(path: str) -> str:
    return _ODD.sub(lambda found: _escape_letter(found[0]), path)


def _escape_letter(letter: str) -> str:
    return "\\\\" if letter == "\\" else f"\\x{ord(letter) - 0xDC00:02x}"


def show(path: str) -> str:
    """Return the path, escaped if it is not UTF-8."""
    return escape(path) if is_odd(path) else path


def unescape(text: str) -> str:
    """Return the path that an escaped text means. Raises BadRequest."""
    path = _ESCAPE.sub(_unescape_byte, text)
    # Bytes that were escaped one by one may be one letter: decode them as a whole.
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def _unescape_byte(found: re.Match[str]) -> str:
    if found[1]:
        return chr(0xDC00 + int(found[1], 16))
    if found[2]:
        return "\\"
    raise BadRequest(r"An escaped path has \x80 to \xff for bytes, and \\ for a backslash")
