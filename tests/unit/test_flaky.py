"""What a run with FLAKY tests ends with: scripts/flaky.py, and the list that it reads."""

from __future__ import annotations

import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "flaky.py"
LIST = REPOSITORY / "tests" / "quarantine.txt"
TEST = "tests/unit/test_x.py::test_y[a b]"
STRICT = [{"CI": "true"}, {"PARACLE_STRICT": "1"}]
NOT_STRICT = [{}, {"CI": "false"}, {"PARACLE_STRICT": "0"}, {"CI": "true", "PARACLE_STRICT": "0"}]


def days_ago(days: int) -> str:
    return (date.today() - timedelta(days)).isoformat()


def decide(
    folder: Path, entries: str, flaky: list[str], environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    path = folder / "list.txt"
    path.write_text(entries)
    return subprocess.run(
        [sys.executable, SCRIPT, path], input="\n".join(flaky), env=environ,
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@pytest.mark.parametrize("environ", [*STRICT, *NOT_STRICT])
def test_nothing_flaky_and_nothing_known(tmp_path: Path, environ: dict[str, str]) -> None:
    done = decide(tmp_path, "# a comment\n\n", [], environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("environ", "code"), [*((one, 1) for one in STRICT), *((one, 0) for one in NOT_STRICT)]
)
def test_an_unknown_one_fails_strict_runs(
    tmp_path: Path, environ: dict[str, str], code: int
) -> None:
    done = decide(tmp_path, "", [TEST], environ)
    assert done.returncode == code
    assert f"FLAKY: {TEST}\n" in done.stdout and "not on the list" in done.stdout


def test_a_known_one_fails_nothing(tmp_path: Path) -> None:
    done = decide(tmp_path, f"{TEST} {days_ago(30)} a race of two ends", [TEST], {"CI": "true"})
    assert done.returncode == 0
    assert done.stdout == f"FLAKY: {TEST} (known: a race of two ends)\n"
    other = decide(tmp_path, f"{TEST}2 {days_ago(1)} another", [TEST], {"CI": "true"})
    assert other.returncode == 1


@pytest.mark.parametrize("flaky", [[], [TEST]])
def test_an_old_entry_fails_strict_runs(tmp_path: Path, flaky: list[str]) -> None:
    """Also if the test did not fail this time."""
    old = f"{TEST} {days_ago(31)} a race of two ends"
    done = decide(tmp_path, old, flaky, {"PARACLE_STRICT": "1"})
    assert done.returncode == 1 and "for 31 days" in done.stdout
    assert decide(tmp_path, old, flaky, {}).returncode == 0


def test_an_entry_of_tomorrow_fails_strict_runs(tmp_path: Path) -> None:
    done = decide(tmp_path, f"{TEST} {days_ago(-2)} for longer", [TEST], {"CI": "true"})
    assert done.returncode == 1 and "yet to come" in done.stdout


@pytest.mark.parametrize("line", [TEST, f"{TEST} {days_ago(1)}", f"{TEST} yesterday a race"])
def test_a_list_that_cannot_be_read_fails_every_run(tmp_path: Path, line: str) -> None:
    done = decide(tmp_path, f"# first\n{line}\n", [], {})
    assert done.returncode == 1 and "line 2" in done.stderr
    missing = subprocess.run([sys.executable, SCRIPT, tmp_path / "none"], input="", text=True)
    assert missing.returncode == 1


def test_what_is_on_the_list_is_there() -> None:
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            path, _, name = line.partition("::")
            name = name.split("::")[-1].split("[")[0].split()[0]
            assert f"def {name}(" in (REPOSITORY / path).read_text(), line
    done = subprocess.run([sys.executable, SCRIPT, LIST], input="", text=True)
    assert done.returncode == 0
