"""``paracle keys``: who may use the service."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import InRange
from ..errors import SandboxError
from . import exit_codes, output
from .exit_codes import UsageFault
from .options import add_json, settings_or_fault
from .parser import Command

if TYPE_CHECKING:
    from ..service.keys import KeyStore

_JSON = "Print one JSON document."
_DAY = 86_400


def declare_make(command: Command) -> None:
    command.text = """\
        Make a key and show it, this once: only its hash is kept.

        Examples:
          paracle keys make alice bob
          paracle keys make --admin --days 30 --note "dashboard"
        """
    command.argument("users", "USERS", "The users it acts for.", "*")
    command.switch("--admin", help="It acts for every user.")
    command.option(
        "--days", metavar="NUMBER", check=InRange(float, -math.inf, math.inf),
        help="It expires after so many days.",
    )  # fmt: skip
    command.option("--note", metavar="TEXT", default="", help="What it is for.")
    add_json(command, _JSON)
    command.action = lambda given: make(
        given.users, given.admin, given.days, given.note, given.as_json
    )


def make(users: list[str], admin: bool, days: float | None, note: str, as_json: bool) -> int:
    if not users and not admin:
        raise UsageFault("Name the users it acts for, or give --admin")
    if days is not None and days <= 0:
        raise UsageFault("--days must be more than 0")
    _check_users(users)
    expires = None if days is None else time.time() + days * _DAY
    with _store() as store:
        key = store.make(users, admin=admin, expires=expires, note=note)
    _record("key_made", key=key.split("_")[1], admin=admin)
    if as_json:
        output.say_json({"key": key, "key_id": key.split("_")[1]})
    else:
        output.say(key)
    return exit_codes.SUCCESS


def declare_list(command: Command) -> None:
    command.text = "Show the keys, without their secrets."
    add_json(command, _JSON)
    command.action = lambda given: list_keys(given.as_json)


def list_keys(as_json: bool) -> int:
    with _store() as store:
        keys = store.all()
    now = time.time()
    if as_json:
        output.say_json(
            [{"key_id": k.key_id, "users": list(k.users), "admin": k.admin, "note": k.note,
              "created": k.created, "expires": k.expires, "works": k.is_good(now)} for k in keys]
        )  # fmt: skip
        return exit_codes.SUCCESS
    rows = [
        (k.key_id, "everybody" if k.admin else ", ".join(k.users), output.tick(k.is_good(now)),
         _day(k.created), _day(k.expires), k.note)
        for k in keys
    ]  # fmt: skip
    if rows:
        output.table("", ("Key", "Acts for", "Works", "Made", "Expires", "Note"), rows)
    else:
        output.say("There are no keys. Make one with: paracle keys make --admin")
    return exit_codes.SUCCESS


def declare_revoke(command: Command) -> None:
    command.text = "Make a key useless, at once and for good."
    command.argument("key_id", "KEY", "Its id, as list shows it.")
    add_json(command, _JSON)
    command.action = lambda given: revoke(given.key_id, given.as_json)


def revoke(key_id: str, as_json: bool) -> int:
    with _store() as store:
        revoked = store.revoke(key_id)
    if not revoked:
        raise UsageFault(f"There is no key {key_id!r} that works; see: paracle keys list")
    _record("key_revoked", key=key_id)
    if as_json:
        output.say_json({"key_id": key_id, "revoked": True})
    else:
        output.say(f"✅ Key {key_id} revoked")
    return exit_codes.SUCCESS


def _check_users(users: list[str]) -> None:
    """Refuse names that the service refuses: a key for them would open nothing."""
    from ..service.errors import BadRequest
    from ..service.users.names import checked_user_id

    for user in users:
        try:
            checked_user_id(user)
        except BadRequest as error:
            raise UsageFault(f"{user!r}: {error}") from None


def refuse_windows() -> None:
    """Say that the service needs Linux, before a module is imported that Windows lacks."""
    if sys.platform == "win32":
        raise UsageFault(
            "The service and its keys need Linux, and this is Windows. Run this on the machine of "
            "the service; sandboxes of a service are used from here with SANDBOX_API_URL."
        )


@contextmanager
def _store() -> Iterator[KeyStore]:
    from ..service.keys import KeyStore

    refuse_windows()
    directory = settings_or_fault().service_dir
    with database_errors_explained(directory):
        store = KeyStore(Path(directory))
        try:
            yield store
        finally:
            store.close()


@contextmanager
def database_errors_explained(directory: str) -> Iterator[None]:
    """Raises SandboxError in place of what SQLite says of a full disk or a damaged file."""
    import sqlite3

    try:
        yield
    except sqlite3.Error as error:
        remedy = "Make room, and see that this user may write there."
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError
        ):
            remedy = (
                "Bring keys.db or answers.db there back from a backup, or move it away: "
                "keys have to be made anew then."
            )
        raise SandboxError(
            f"The service's database in {directory} cannot be used: {error}. {remedy}"
        ) from error


def _record(event: str, **fields: object) -> None:
    from ..audit.log import AuditLog

    log = AuditLog(Path(settings_or_fault().service_dir) / "audit.jsonl")
    log.record(event, by="paracle keys", **fields)
    log.close()


def _day(moment: float | None) -> str:
    return "-" if moment is None else time.strftime("%Y-%m-%d", time.localtime(moment))
