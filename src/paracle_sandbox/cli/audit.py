"""``paracle audit``: what the service wrote down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from . import exit_codes, output
from .exit_codes import UsageFault
from .options import ANY_COUNT, add_json, settings_or_fault
from .parser import Command

_JSON = "Print JSON, one object a line."
_SHOWN_APART = ("n", "time", "event", "user", "previous", "hash")


def _add_filters(command: Command) -> None:
    command.option("--user", metavar="NAME", help="Only of this user.")
    command.option("--event", metavar="KIND", help="Only of this kind.")


def declare_show(command: Command) -> None:
    command.text = "Show what was written down, the newest last."
    _add_filters(command)
    command.option(
        "--last", metavar="NUMBER", check=ANY_COUNT, default=100, help="So many lines at most."
    )
    add_json(command, _JSON)
    command.action = lambda given: show(given.user, given.event, given.last, given.as_json)


def show(user: str | None, event: str | None, last: int, as_json: bool) -> int:
    from collections import deque

    from ..audit.log import read

    wanted = (line for line in read(_path()) if _fits(line, user, event))
    for line in deque(wanted, maxlen=max(1, last)):
        _say(line, as_json)
    return exit_codes.SUCCESS


def declare_verify(command: Command) -> None:
    command.text = """\
        Check that nothing was changed or removed. Exits with 1 when something was.
        """
    command.option(
        "--after", metavar="HASH",
        help="Hash of the last line that is kept elsewhere, when early files are.",
    )  # fmt: skip
    add_json(command, "Print JSON.")
    command.action = lambda given: verify(given.after, given.as_json)


def verify(after: str | None, as_json: bool) -> int:
    from ..audit.log import FIRST, verify

    verdict = verify(_path(), after or FIRST)
    whole = verdict.broken_at is None
    if as_json:
        output.say_json(
            {"whole": whole, "lines": verdict.lines, "head": verdict.head,
             "broken_at": verdict.broken_at, "reason": verdict.reason, "removed": verdict.removed,
             "file": verdict.file or None}
        )  # fmt: skip
    elif whole:
        pruned = f", after {verdict.removed} that were pruned" if verdict.removed else ""
        output.say(f"✅ {verdict.lines} lines, unbroken{pruned}. Last hash: {verdict.head}")
    else:
        where = f"line {verdict.broken_at}, in {verdict.file}"
        output.say(f"❌ Broken at {where}: {verdict.reason}")
    return exit_codes.SUCCESS if whole else exit_codes.FAILURE


def declare_tail(command: Command) -> None:
    command.text = "Show what is written down from now on, until Ctrl-C."
    _add_filters(command)
    add_json(command, _JSON)
    command.action = lambda given: tail(given.user, given.event, given.as_json)


def tail(user: str | None, event: str | None, as_json: bool) -> int:
    from ..audit.log import follow

    for line in follow(_path()):
        if _fits(line, user, event):
            _say(line, as_json)
            sys.stdout.flush()
    return exit_codes.SUCCESS


def _path() -> Path:
    from ..audit.log import is_there

    path = Path(settings_or_fault().service_dir) / "audit.jsonl"
    if not is_there(path):
        raise UsageFault(f"There is no audit log at {path}; set SANDBOX_DATA_DIR to the service's")
    return path


def _fits(line: dict[str, Any], user: str | None, event: str | None) -> bool:
    return (user is None or line.get("user") == user) and (
        event is None or line.get("event") == event
    )


def _say(line: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(line))
        return
    rest = " ".join(f"{k}={v!r}" for k, v in line.items() if k not in _SHOWN_APART)
    # A line that another program has put there may have none of them.
    n, moment, event, user = (str(line.get(key, "-")) for key in ("n", "time", "event", "user"))
    output.say(f"{n:>6} {moment} {event:<18} {user} {rest}")
