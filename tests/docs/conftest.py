"""The pages are followed on a machine on which nothing of ours was ever run.

Each page, block of commands and example has empty data, state, cache and home directories of its
own, and a package index of the test, from which templates are built as on a user's first day.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cli.paracle_cli import SOURCE, make_wheel, wait_for
from fresh.conftest import Index, builders
from paracle_sandbox.backends.native.template_kinds import PACKAGES


@pytest.fixture(scope="session", autouse=True)
def own_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``paracle`` is that of this checkout, whatever is installed, and no setting is inherited."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "paracle"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m paracle_sandbox "$@"\n')
    command.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
        paths = filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("PYTHONIOENCODING", "utf-8")
        patch.delenv("SANDBOX_MODE", raising=False)
        patch.delenv("PARACLE_TEMPLATE_BUILD", raising=False)
        yield


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """Tiny packages with the names of those of all templates."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in {name for names in PACKAGES.values() for name in names}:
        make_wheel(folder, name.replace("-", "_"))
    with Index(folder) as index:
        index.is_open.set()
        yield index


@pytest.fixture
def empty_machine(
    index: Index, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The home of a new user; all else is below it, and nothing of it is there yet."""
    home = tmp_path_factory.mktemp("home")
    for name, path in {
        "HOME": home, "XDG_CACHE_HOME": home / "cache", "PARACLE_STATE_DIR": home / "state",
        "PARACLE_DATA_DIR": home / "data", "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index.url,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(path))
    yield home
    for pid in builders(home):  # a build that outlives what began it
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
    wait_for(lambda: not builders(home), 60)
