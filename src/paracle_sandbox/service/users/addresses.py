"""Users in addresses: one segment of the path, whatever the text is made of.

Servers decode a path before they split it, and then `a%2Fb` looks like two segments. Here the
user's segment is found before it is decoded; routes see it in its encoded form, which has no
slash, and ``user_in`` gives the text back.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes

from ..errors import BadRequest
from .names import checked_user_id

_BEFORE = b"/sandbox/"
# As they stand these are steps of a path, which clients and proxies resolve; encoded, text.
_STEPS = (b".", b"..")


def routed_path(scope: MutableMapping[str, Any]) -> str:
    """The path that routes are found by. Raises BadRequest for a step where a user should be."""
    raw: bytes = scope.get("raw_path") or b""
    if not raw.startswith(_BEFORE):
        return str(scope["path"])
    segment, slash, rest = raw.removeprefix(_BEFORE).partition(b"/")
    if segment in _STEPS:
        raise BadRequest("The address has a step of a path where a user should be")
    user = quote(unquote_to_bytes(segment), safe="")
    return f"{_BEFORE.decode()}{user}{slash.decode()}{unquote(rest.decode('latin-1'))}"


def user_in(segment: str) -> str:
    """The user that a segment, or a header, names. Raises BadRequest."""
    try:
        return checked_user_id(unquote_to_bytes(segment).decode())
    except UnicodeDecodeError:
        raise BadRequest("The user id is not UTF-8") from None
