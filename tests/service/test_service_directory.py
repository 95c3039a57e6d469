"""The service's data directory holds keys and the audit log: nobody else may have written them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paracle_sandbox.agents.journal import open_agents_log
from paracle_sandbox.errors import SandboxError
from paracle_sandbox.service.keys import KeyStore
from paracle_sandbox.service.service import Service
from paracle_sandbox.settings import Settings
from paracle_sandbox.testing.fake import FakeBackend

USES: dict[str, Callable[[Path], object]] = {
    "service": lambda path: Service(Settings(service_dir=str(path)), FakeBackend()),
    "keys": KeyStore,
    "agents' log": lambda path: open_agents_log(Settings(data_dir=str(path))),
}


def given_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user: run as root")
@pytest.mark.parametrize("theirs", [given_away, open_to_all], ids=lambda one: one.__name__)
@pytest.mark.parametrize("use", USES)
def test_a_directory_that_another_can_write_to_is_refused(
    tmp_path: Path, use: str, theirs: Callable[[Path], None]
) -> None:
    path = tmp_path / "data"
    path.mkdir()
    theirs(path)
    with pytest.raises(
        SandboxError, match="belongs to user 65534|written by every user"
    ) as refused:
        USES[use](path)
    assert "DATA_DIR" in str(refused.value)
    assert list(path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user: run as root")
def test_the_command_line_says_so(tmp_path: Path) -> None:
    given_away(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", "keys", "list"],
        env={**os.environ, "SANDBOX_DATA_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "belongs to user 65534" in said and "Traceback" not in said


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_one_of_this_user_is_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "data"
    path.mkdir(mode)
    open_agents_log(Settings(data_dir=str(path))).close()
