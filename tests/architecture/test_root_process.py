"""SECURITY.md lists the files of the process that has all rights, so that they can be read."""

from __future__ import annotations

import re
from pathlib import Path

from root_process import SOURCE, root_modules

_PAGE = SOURCE.parent / "SECURITY.md"


def listed() -> set[str]:
    """The modules of the list. A file without a folder is in the folder of the one before it."""
    text = _PAGE.read_text(encoding="utf-8")
    section = text.partition("## What runs as root")[2].partition("\n## ")[0]
    found, folder = set(), Path()
    for line in re.findall(r"^\d\. .*(?:\n   .*)*", section, re.MULTILINE):
        for name in re.findall(r"`([\w/]+\.py)`", line):
            path = Path(name)
            folder = path.parent if path.parent != Path() or len(path.parts) > 1 else folder
            own = path if len(path.parts) > 1 else folder / path
            if not (SOURCE / "paracle_sandbox" / own).exists():
                own = path  # a file of the package itself
            assert (SOURCE / "paracle_sandbox" / own).exists(), f"{name} is not there"
            found.add(".".join(("paracle_sandbox", *own.with_suffix("").parts)))
    return found


def test_the_list_of_files_to_read_is_whole_and_true() -> None:
    lines = root_modules()
    loaded = {name for name, count in lines.items() if count > 1}
    missing = loaded - listed() - {"paracle_sandbox"}
    assert not missing, f"SECURITY.md does not name what has all rights: {sorted(missing)}"
    assert not listed() - loaded, f"it does not load these: {sorted(listed() - loaded)}"


def test_it_loads_nothing_of_what_runs_in_sandboxes() -> None:
    inside = ("paracle_sandbox.guest.main", "paracle_sandbox.jail.confine")
    assert not set(root_modules()) & set(inside)
    assert sum(root_modules().values()) < 5000
