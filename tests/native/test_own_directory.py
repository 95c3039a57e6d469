"""The state directory: records decide what gets killed, so nobody else may have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.own_directory import require_own_directory
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError
from paracle_sandbox.settings import Settings


def test_one_that_is_missing_is_made_for_us_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        require_own_directory(str(tmp_path / "state"))
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def others_may_write(state: Path) -> None:
    state.mkdir()
    state.chmod(0o777)


def is_a_link(state: Path) -> None:
    state.with_name("own").mkdir(0o700)
    state.symlink_to(state.with_name("own"))


def is_a_file(state: Path) -> None:
    state.touch(0o600)


def belongs_to_another(state: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a directory to another user: run as root")
    state.mkdir(0o700)
    os.chown(state, 65534, 65534)


@pytest.mark.parametrize(
    "found", [others_may_write, is_a_link, is_a_file, belongs_to_another], ids=lambda f: f.__name__
)
async def test_no_sandbox_starts_on_what_may_be_another_s(tmp_path: Path, found):
    found(tmp_path / "state")
    backend = NativeBackend(Settings(state_dir=str(tmp_path / "state"), template_build=False))
    try:
        with pytest.raises(BackendUnavailableError, match="PARACLE_STATE_DIR to another"):
            await backend.create("x", SandboxConfig(), {})
    finally:
        await backend.close()
