"""``paracle audit``: what the service wrote down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import exit_codes, output
from .exit_codes import UsageFault, ends_with_a_code
from .options import settings_or_fault

app = typer.Typer(
    help="The audit log of the sandbox service.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

User = Annotated[str | None, typer.Option("--user", help="Only of this user.")]
Event = Annotated[str | None, typer.Option("--event", help="Only of this kind.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
_SHOWN_APART = ("n", "time", "event", "user", "previous", "hash")


@app.command()
@ends_with_a_code
def show(
    user: User = None,
    event: Event = None,
    last: Annotated[int, typer.Option(help="So many lines at most.")] = 100,
    as_json: Json = False,
) -> int:
    """Show what was written down, the newest last."""
    from collections import deque

    from ..audit.log import read

    wanted = (line for line in read(_path()) if _fits(line, user, event))
    for line in deque(wanted, maxlen=max(1, last)):
        _say(line, as_json)
    return exit_codes.SUCCESS


@app.command()
@ends_with_a_code
def verify(
    after: Annotated[
        str | None,
        typer.Option(help="Hash of the last line that is kept elsewhere, when early files are."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check that nothing was changed or removed. Exits with 1 when something was."""
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


@app.command()
@ends_with_a_code
def tail(user: User = None, event: Event = None, as_json: Json = False) -> int:
    """Show what is written down from now on, until Ctrl-C."""
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
