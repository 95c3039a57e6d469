"""Users and the names of their sandboxes: any text but a way through directories is a user, and no
two share a name."""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata
from pathlib import Path

from ..errors import BadRequest

MAX_USER_ID = 1024
# Names of directories are hashes of it, so it could lead nowhere; but whoever sends one tries to,
# and what stands behind this service may take it for what it looks like.
_SLASHES = re.compile("[/\\\\\u2044\u2215\u29f8\uff0f\uff3c]")


def checked_user_id(user_id: str) -> str:
    """The id, unchanged. Raises BadRequest for what is no text."""
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


class Names:
    """Names of sandboxes and directories, out of users and a secret of this installation.

    Hashed, so that every text becomes a name and different ones become different names; keyed,
    so that two services on a machine never take each other's, and nobody can guess one.
    """

    def __init__(self, directory: Path) -> None:
        self._key = _installation_key(directory / "installation")

    @property
    def installation(self) -> str:
        """What tells this installation's sandboxes from others'."""
        return self._digest("installation")

    def user_sandbox(self, user_id: str) -> str:
        return f"u-{self._digest('user', user_id)}"

    def own_sandbox(self, user_id: str, sandbox_id: str) -> str:
        """The name of a sandbox that a user made under an id of its own choice."""
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
            path.hardlink_to(fresh)  # whoever comes first decides, for both
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
        return bytes.fromhex(path.read_text())
