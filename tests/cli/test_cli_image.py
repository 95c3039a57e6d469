"""``paracle image`` where there is no engine: what it says and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from paracle_cli import SOURCE, Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, DOCKER_HOST=f"unix://{tmp_path}/nobody.sock")


def test_help_names_the_verbs(cli: Cli) -> None:
    done = cli.run("image", "--help")
    assert done.code == 0
    assert "build" in done.stdout and "list" in done.stdout


def test_an_unknown_variant_is_two(cli: Cli) -> None:
    done = cli.run("image", "build", "nope")
    assert done.code == 2
    assert "no image variant 'nope'; known are sandbox, dev, ml, api" in done.stderr


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["build"], ["build", "ml"]])
def test_without_an_engine_is_three(cli: Cli, words: list[str]) -> None:
    done = cli.run("image", *words)
    assert done.code == 3
    assert done.stdout == ""
    assert "Error: Docker not available: " in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_the_cause_is_told(cli: Cli, tmp_path: Path) -> None:
    """DOCKER_HOST wins over a context, as with Docker's own client."""
    cli.env["DOCKER_CONTEXT"] = "no-such-context"
    done = cli.run("image", "list")
    assert f"is not running: there is no {tmp_path}/nobody.sock. Start it" in done.stderr


def test_a_docker_host_that_is_none_is_three(tmp_path: Path) -> None:
    done = Cli(tmp_path, DOCKER_HOST="nonsense").run("image", "list")
    assert done.code == 3
    assert "Docker not available: " in done.stderr


def test_without_the_library_the_exact_install_line_is_given(tmp_path: Path) -> None:
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "aiodocker.py").write_text("raise ImportError('not installed')")
    done = Cli(tmp_path, PYTHONPATH=f"{tmp_path}/missing:{SOURCE}").run("image", "list")
    assert done.code == 3
    assert "pip install '.[docker]'" in done.stderr
