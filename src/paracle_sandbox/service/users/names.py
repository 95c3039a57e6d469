"""User ids: which texts are one, how an address carries one, and the names that are made of them.

Any text is a user id, except one that looks like a path through directories. In an address it is
one segment. Servers decode a path before they split it, so that ``a%2Fb`` looks like two segments;
``routed_path`` finds the user's segment before it is decoded, routes see it in its encoded form,
which has no slash, and ``user_in`` decodes it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes

from ..errors import BadRequest

MAX_USER_ID = 1024
# Directories are named by a hash of the user id, so a path leads nowhere here. It is refused as an
# attempt, and because a system behind this service might follow it.
_SLASHES = re.compile("[/\\\\\u2044\u2215\u29f8\uff0f\uff3c]")
_BEFORE = b"/sandbox/"
# Clients and proxies resolve these as steps of a path, unless they are encoded.
_STEPS = (b".", b"..")


def checked_user_id(user_id: str) -> str:
    """Return the id unchanged. Raises BadRequest if it is no user id."""
    if not user_id:
        raise BadRequest("The user id is empty: use a name, a number or an address")
    if len(user_id) > MAX_USER_ID:
        raise BadRequest(f"The user id is longer than {MAX_USER_ID} characters")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in user_id):
        raise BadRequest("The user id has control characters")
    first, *others = _SLASHES.split(user_id)
    if {first, *others} & {".", ".."} or (others and not first):
        raise BadRequest("The user id looks like a path: a slash at its beginning, or . or ..")
    return user_id


def routed_path(scope: MutableMapping[str, Any]) -> str:
    """Return the path that routes are matched with. Raises BadRequest where a user should be and a
    step of a path is."""
    raw: bytes = scope.get("raw_path") or b""
    if not raw.startswith(_BEFORE):
        return str(scope["path"])
    segment, slash, rest = raw.removeprefix(_BEFORE).partition(b"/")
    if segment in _STEPS:
        raise BadRequest("The address has a step of a path where a user should be")
    user = quote(unquote_to_bytes(segment), safe="")
    return f"{_BEFORE.decode()}{user}{slash.decode()}{unquote(rest.decode('latin-1'))}"


def user_in(segment: str) -> str:
    """Return the user that a segment, or a header, names. Raises BadRequest."""
    try:
        return checked_user_id(unquote_to_bytes(segment).decode())
    except UnicodeDecodeError:
        raise BadRequest("The user id is not UTF-8") from None


class Names:
    """Makes names of sandboxes and directories from user ids and a secret of this installation.

    Names are hashes, so that every text has one and different texts have different ones. They are
    keyed, so that two services on a machine never share a name, and none can be guessed.
    """

    def __init__(self, directory: Path) -> None:
        self._key = _installation_key(directory / "installation")

    @property
    def installation(self) -> str:
        """The mark by which this installation's sandboxes are told from others'."""
        return self._digest("installation")

    def user_sandbox(self, user_id: str) -> str:
        return f"u-{self._digest('user', user_id)}"

    def own_sandbox(self, user_id: str, sandbox_id: str) -> str:
        """Name a sandbox that a user made under an id of its own choice."""
        return f"s-{self._digest('own', user_id, sandbox_id)}"

    def workspace(self, user_id: str) -> str:
        return self._digest("workspace", user_id)

    def _digest(self, *parts: str) -> str:
        framed = "".join(f"{len(part)}:{part}" for part in parts)
        return hashlib.blake2b(framed.encode(), key=self._key, digest_size=20).hexdigest()


def _installation_key(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text())
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        fresh.write_text(secrets.token_hex(32))
        fresh.chmod(0o600)
        try:
            path.hardlink_to(fresh)  # the first process decides, for both
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        return bytes.fromhex(path.read_text())
