"""Sandboxes of these tests are on their own: own records, own volume, no packages to install."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of everything that is started here, and of this process meanwhile."""
    base = tmp_path_factory.mktemp("paracle")
    return {
        "PARACLE_STATE_DIR": str(base / "state"),
        "PARACLE_DATA_DIR": str(base / "data"),
        "PARACLE_TEMPLATE_BUILD": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY / "src"), _given_path()])),
        "PYTHONIOENCODING": "utf-8",
        # `paracle` is this checkout's, whatever is installed.
        "PATH": os.pathsep.join([str(_commands(base)), os.environ["PATH"]]),
    }


def _given_path() -> str:
    return os.environ.get("PYTHONPATH", "")


def _commands(base: Path) -> Path:
    directory = base / "bin"
    directory.mkdir()
    command = directory / "paracle"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paracle_sandbox "$@"\n')
    command.chmod(0o755)
    return directory


@pytest.fixture(scope="session", autouse=True)
def own_directories(variables: dict[str, str]) -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.delenv("SANDBOX_MODE", raising=False)
        yield
