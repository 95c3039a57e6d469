"""The scripted task of the end-to-end tests: a project with a bug, and a model that mends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agents.model_server import Conversation, Turn
from cli.paracle_cli import Done

_RUN_TESTS = ("sandbox_shell", {"command": "python3 -m unittest 2>&1"})


def broken_project(folder: Path) -> Path:
    """A project with a bug, a test that shows it, and things that must not come back."""
    (folder / ".git" / "hooks").mkdir(parents=True)
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_calc.py").write_text(
        "import unittest\nfrom calc import add\n\n\nclass Test(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
    )
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    return folder


def fixing(request: dict[str, Any]) -> Turn:
    """A model that looks, mends what it saw fail, and checks."""
    said = json.dumps(request["messages"])
    if "Replaced in calc.py" in said and "OK" in said.split("Replaced in calc.py")[1]:
        return Turn("I mended add(); the test passes now.")
    if "Replaced in calc.py" in said:
        return Turn("", [_RUN_TESTS])
    if "AssertionError" in said:
        mend = {"action": "str_replace", "file_path": "calc.py", "old_str": "a - b",
                "new_str": "a + b"}  # fmt: skip
        return Turn("The sign is wrong.", [("sandbox_files", mend)])
    return Turn("I run the tests.", [_RUN_TESTS])


def check_mended(home: Path, project: Path, done: Done) -> None:
    """It worked in a sandbox, said what it did, and its one change is in the user's file."""
    assert done.code == 0, done
    assert "I mended add()" in done.stdout
    assert "-    return a - b\n+    return a + b\n" in done.stdout
    assert (project / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    saved = json.loads((home / "result.json").read_text())
    assert saved["success"] and saved["applied"] and saved["config"]["sandbox"] is True
    assert [change["path"] for change in saved["changes"]] == ["calc.py"]


def words(chat: Conversation, dialect: str = "openai", mode: str = "sandbox") -> list[str]:
    """``paracle agents run coder`` against the scripted model."""
    url = chat.url + ("/v1" if dialect == "openai" else "")
    return ["agents", "run", "coder", "--task", "Fix bug", "--mode", mode, "--model", "m",
            "--provider", dialect, "--base-url", url]  # fmt: skip
