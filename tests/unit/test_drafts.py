"""Tests of the notes about copies under way: what is swept after dead processes, and what is left
alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paracle_sandbox.backends.base import Backend
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.machine.drafts import Drafts
from paracle_sandbox.backends.machine.owner import Owner
from paracle_sandbox.backends.remote.backend import RemoteBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxError
from paracle_sandbox.settings import Settings

NAME = ".paracle-0123456789abcdef"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state" / "drafts").mkdir(0o700, parents=True)
    return tmp_path / "state"


def dead() -> Owner:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    child.communicate()
    assert not owner.is_alive
    return owner


def note(state: Path, owner: object, path: Path) -> Path:
    made = state / "drafts" / "note"
    made.symlink_to(f"{owner}:{path}")
    return made


def draft(folder: Path, name: str = NAME) -> Path:
    (folder / name / "deep").mkdir(parents=True)
    (folder / name / "deep" / "file").write_text("half")
    return folder / name


def test_there_is_a_note_as_long_as_there_may_be_a_draft(state: Path, tmp_path: Path):
    with Drafts(str(state)).noting(tmp_path, tmp_path / "there") as name:
        (one, two) = sorted(os.readlink(found) for found in (state / "drafts").iterdir())
        assert one == f"{Owner.of(os.getpid())}:{tmp_path}/{name.decode()}"
        assert two == f"{Owner.of(os.getpid())}:{tmp_path}/there/{name.decode()}"
    assert not [*(state / "drafts").iterdir()]


def test_a_note_is_kept_as_long_as_there_is_a_draft(state: Path, tmp_path: Path):
    with Drafts(str(state)).noting(tmp_path) as name:
        (tmp_path / name.decode()).touch()
    assert len([*(state / "drafts").iterdir()]) == 1
    (tmp_path / name.decode()).unlink()


def test_the_state_directory_that_is_made_is_ours_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        with Drafts(str(tmp_path / "made")).noting(tmp_path):
            pass
    finally:
        os.umask(before)
    for made in ("made", "made/drafts"):
        assert (tmp_path / made).stat().st_mode & 0o777 == 0o700


def test_whom_we_cannot_look_at_is_alive(monkeypatch: pytest.MonkeyPatch):
    me = Owner.of(os.getpid())
    # This is the case with hidepid.
    monkeypatch.setattr("paracle_sandbox.backends.machine.owner.start_time", lambda _: None)
    assert me.is_alive
    assert not replace(me, pid=1 << 24).is_alive  # more than there can be


@pytest.mark.parametrize("state_dir", [None, "/dev/null/state", "/proc/none"])
def test_a_copy_goes_on_where_nothing_can_be_noted(state_dir: str | None, tmp_path: Path):
    drafts = Drafts(state_dir)
    with drafts.noting(tmp_path) as name:
        assert name.startswith(b".paracle-")
    drafts.sweep()


def test_those_of_the_dead_are_removed_and_nothing_else(state: Path, tmp_path: Path):
    (tmp_path / "canary").write_text("whole")
    left = draft(tmp_path)
    (left / "deep" / "link").symlink_to(tmp_path / "canary")
    made = note(state, dead(), left)
    Drafts(str(state)).sweep()
    assert not left.exists() and not made.is_symlink()
    assert (tmp_path / "canary").read_text() == "whole"


def test_a_file_is_removed_and_a_link_is_not_followed(state: Path, tmp_path: Path):
    (tmp_path / "canary").mkdir()
    (tmp_path / NAME).symlink_to(tmp_path / "canary")
    note(state, dead(), tmp_path / NAME)
    Drafts(str(state)).sweep()
    assert not (tmp_path / NAME).is_symlink() and (tmp_path / "canary").is_dir()


@pytest.mark.parametrize(
    "who",
    [
        Owner.of(os.getpid()),
        replace(Owner.of(os.getpid()), machine="other"),
        "v2/of/a/later/version/of/us",
    ],
    ids=["alive", "elsewhere", "unknown"],
)
def test_those_of_the_living_stay(state: Path, tmp_path: Path, who: object):
    made = note(state, who, draft(tmp_path))
    Drafts(str(state)).sweep()
    assert (tmp_path / NAME).exists() and made.is_symlink()


@pytest.mark.parametrize(
    "backend",
    [
        lambda state: RemoteBackend(Settings(api_url="http://127.0.0.1:1", state_dir=state)),
        lambda state: DockerBackend(Settings(docker_host="unix:///none", state_dir=state)),
    ],
    ids=["remote", "docker"],
)
async def test_backends_sweep_when_they_are_first_used(
    state: Path, tmp_path: Path, backend: Callable[[str], Backend]
):
    note(state, dead(), draft(tmp_path))
    place = backend(str(state))
    with pytest.raises(SandboxError):  # there is no sandbox; it has been swept before
        await place.create("x", SandboxConfig(), {})
    await place.close()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("name", ["precious", ".paracle-term-012345", NAME + "0", ".."])
def test_only_drafts_are_removed_whatever_a_note_says(state: Path, tmp_path: Path, name: str):
    folder = tmp_path / "folder"
    draft(folder, "precious")
    if name != "..":
        (folder / name).mkdir(exist_ok=True)
    made = note(state, dead(), folder / name)
    Drafts(str(state)).sweep()
    assert (folder / name).exists() and (folder / "precious" / "deep" / "file").exists()
    assert not made.is_symlink()


def test_without_a_state_directory_the_current_one_is_left_alone(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = note(state, dead(), draft(tmp_path))
    monkeypatch.chdir(state)
    Drafts().sweep()
    assert made.is_symlink() and (tmp_path / NAME).exists()


def test_notes_that_others_may_write_are_not_believed(state: Path, tmp_path: Path):
    note(state, dead(), draft(tmp_path))
    (state / "drafts").chmod(0o777)
    Drafts(str(state)).sweep()
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("text", ["nonsense", "a/b/c/d/e:/nowhere", f"-/-/-/1/1:/none/{NAME}"])
def test_notes_that_say_nothing_are_no_trouble(state: Path, text: str):
    (state / "drafts" / "note").symlink_to(text)
    Drafts(str(state)).sweep()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: run as root")
def test_what_belongs_to_another_user_stays(state: Path, tmp_path: Path):
    left = draft(tmp_path)
    os.chown(left, 65534, 65534)
    note(state, dead(), left)
    Drafts(str(state)).sweep()
    assert left.exists()
