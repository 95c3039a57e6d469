"""Decide what a test run that had FLAKY tests ends with. scripts/run_tests.sh asks.

    flaky.py LIST < FLAKY_TESTS

A test is FLAKY if it failed and then passed when it was run again, alone. The list names those that
are known, one a line: node id, date (YYYY-MM-DD), reason. Exit code 1 means that the run fails: in
strict runs (PARACLE_STRICT=1, or CI=true without PARACLE_STRICT=0) because of a FLAKY test that is
not on the list, and because of an entry that is older than 30 days; in every run because of a list
that cannot be read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

PATIENCE = timedelta(days=30)
# The id of a test may have spaces.
_LINE = re.compile(r"(\S.*?) +(\d{4}-\d{2}-\d{2}) +(.+)")


class ListError(ValueError):
    """A line of the list that does not say what it has to."""


@dataclass(frozen=True)
class Entry:
    """A test that is known to be flaky, since when, and why."""

    test: str
    since: date
    reason: str


def read_list(text: str) -> list[Entry]:
    """The entries. Empty lines and lines that begin with # are none."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            found = _LINE.fullmatch(line.strip())
            if found is None:
                raise ValueError("one of the three is missing")
            entries.append(Entry(found[1], date.fromisoformat(found[2]), found[3]))
        except ValueError as error:
            raise ListError(
                f"line {number}: NODE_ID YYYY-MM-DD REASON is needed: {error}"
            ) from error
    return entries


def is_strict(environ: Mapping[str, str]) -> bool:
    """Return whether FLAKY tests fail the run. PARACLE_STRICT decides, where it is set."""
    strict = environ.get("PARACLE_STRICT", "")
    return strict != "0" if strict else environ.get("CI", "") == "true"


def find_faults(flaky: Iterable[str], entries: Sequence[Entry], today: date) -> list[str]:
    """What fails a strict run, a line each."""
    known = {entry.test for entry in entries}
    found = [f"{test} is FLAKY, and not on the list" for test in flaky if test not in known]
    for entry in entries:
        age = today - entry.since
        if age > PATIENCE:
            found.append(f"{entry.test} is on the list for {age.days} days: mend it, or delete it")
        elif age < timedelta():
            found.append(f"{entry.test} is on the list with a date that is yet to come")
    return found


def main(arguments: Sequence[str], lines: Iterable[str], environ: Mapping[str, str]) -> int:
    path = Path(arguments[0])
    try:
        entries = read_list(path.read_text(encoding="utf-8"))
    except (OSError, ListError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    flaky = [line.strip() for line in lines if line.strip()]
    reasons = {entry.test: entry.reason for entry in entries}
    for test in flaky:
        print(f"FLAKY: {test}" + (f" (known: {reasons[test]})" if test in reasons else ""))
    faults = find_faults(flaky, entries, date.today())
    for fault in faults:
        print(f"{path.name}: {fault}")
    return int(bool(faults) and is_strict(environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, os.environ))
