"""Tests of the trial of a start (jail/trial.py).

Where sandboxes can be created it must find nothing. Otherwise `auto` would select another backend,
and an error would name an obstacle that does not exist.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.paracle_cli import SOURCE
from conformance.test_as_user import USER, interpreter

PROGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
from paracle_sandbox.jail.trial import main
main(sys.argv[2])
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Provide our source where an ordinary user can read it."""
    place = Path(tempfile.mkdtemp(prefix="paracle-trial-"))
    try:
        place.chmod(0o755)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE, place / "src", ignore=ignore)
        (place / "empty").mkdir()
        yield place
    finally:
        shutil.rmtree(place)


def test_it_finds_nothing_as_whoever_runs_the_tests(place: Path) -> None:
    assert tried(place, sys.executable) == "[]"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user")
def test_it_finds_nothing_as_an_ordinary_user(place: Path) -> None:
    shutil.chown(place / "empty", USER, USER)
    assert tried(place, interpreter(), user=USER, group=USER, extra_groups=[]) == "[]"


def tried(place: Path, python: str, **user: object) -> str:
    command = [python, "-I", "-S", "-c", PROGRAM, str(place / "src"), str(place / "empty")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True, **user)  # type: ignore[call-overload]
    return str(done.stdout)
