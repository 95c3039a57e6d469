"""The records in the state directory decide what gets killed, so no other user may have written
them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paracle_sandbox.backends.native import records
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.records import RecordStore, require_own_directory
from paracle_sandbox.backends.native.template_files import Failure, TemplateFiles
from paracle_sandbox.backends.native.template_kinds import (
    MANIFEST,
    find_template,
    template_path,
    templates_dir,
)
from paracle_sandbox.backends.native.templates import Templates
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import BackendUnavailableError, SandboxError, SandboxNotFoundError
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


# Files that another user put there

ANOTHER = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="gives files to another user: run as root"
)


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """Return the record of a living sandbox of ours, whose first process an attacker wants to have
    killed."""
    settings = Settings(state_dir=str(tmp_path / "own"), template_build=False, stock=0)
    backend = NativeBackend(settings)
    await backend.create("victim", SandboxConfig(), {})
    yield dict(backend._owned["victim"].record)
    await backend.close()


def lives(record: dict[str, Any]) -> bool:
    return Path(f"/proc/{record['init']['pid']}").exists()


def plant(state: Path, record: dict[str, Any]) -> None:
    """Write a record as a spawner that has died would have left it."""
    (state / "instances").mkdir(parents=True)
    (state / "victim.json").write_text(json.dumps(record) + "\n")
    (state / "root-5").mkdir()


def content(state: Path) -> dict[str, bytes | None]:
    return {str(one): one.read_bytes() if one.is_file() else None for one in state.rglob("*")}


def give_away(state: Path) -> None:
    for one in (state, *state.rglob("*")):
        os.chown(one, ANOTHER, ANOTHER)


def let_all_write(state: Path) -> None:
    state.chmod(0o777)


def let_all_replace(state: Path) -> None:
    state.parent.chmod(0o777)


METHODS: dict[str, Callable[[NativeBackend], Any]] = {
    "cleanup": lambda backend: backend.sweep(),
    "list": lambda backend: backend.list_sandboxes(),
    "destroy": lambda backend: backend.destroy("victim"),
    "usage": lambda backend: backend.usage("victim"),
    "create": lambda backend: backend.create("new", SandboxConfig(), {}),
}


@needs_root
@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (give_away, r"belongs to user 65534"),
        (let_all_write, "can be written by every user"),
        (let_all_replace, "above it, can be written by every user"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_nothing_is_believed_that_another_may_have_planted(
    tmp_path: Path, victim, theirs: Callable[[Path], None], why: str
):
    state = tmp_path / "shared" / "state"
    plant(state, victim)
    theirs(state)
    before = content(state)
    backend = NativeBackend(Settings(state_dir=str(state), template_build=False))
    for name, method in METHODS.items():
        with pytest.raises(BackendUnavailableError, match=why) as refused:
            await method(backend)
        assert "PARACLE_STATE_DIR to another" in str(refused.value), name
        assert lives(victim), name
        assert content(state) == before, name
    await backend.close()


@needs_root
@pytest.mark.parametrize("command", ["list", "cleanup"])
def test_the_command_line_says_whose_it_is(tmp_path: Path, command: str):
    state = tmp_path / "state"
    state.mkdir()
    give_away(state)
    done = subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", "sandbox", command],
        env={**os.environ, "PARACLE_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0, said
    assert "belongs to user 65534" in said and "PARACLE_STATE_DIR" in said
    assert "Traceback" not in said


@needs_root
async def test_the_records_of_dead_spawners_are_swept_still(tmp_path: Path, victim):
    """In a directory of ours the records of `plant` are believed.

    Otherwise the tests above prove nothing.
    """
    plant(tmp_path / "state", victim)
    assert await NativeBackend(Settings(state_dir=str(tmp_path / "state"))).sweep() == 1
    assert not lives(victim)


# Exactly that process


@pytest.mark.parametrize("field", ["boot", "namespace"])
async def test_a_number_of_another_boot_or_namespace_is_another_process(
    tmp_path: Path, victim, field: str
):
    other = {**victim, "owner": {**victim["owner"], field: "another"}}
    plant(tmp_path / "state", other)
    assert await NativeBackend(Settings(state_dir=str(tmp_path / "state"))).sweep() == 1
    assert lives(victim)


def test_only_the_first_process_of_a_namespace_is_killed(tmp_path: Path):
    with a_process() as pid:
        me = records.identified(os.getpid())
        init = {"pid": pid, "start": records.start_time(pid)}
        plant(tmp_path, {"id": "victim", "instance": 0, "token": "t", "owner": me, "init": init})
        assert RecordStore(tmp_path).sweep() == 1
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_member_of_a_group_is_killed_only_if_the_kernel_says_so(tmp_path: Path):
    """The number may be another process's by now, and 0 would mean all of ours."""
    group = tmp_path / "slot"
    group.mkdir()
    with a_process() as pid:
        (group / "cgroup.procs").write_text(f"{pid}\n0\n")
        program = (
            "import sys; from paracle_sandbox.backends.native.records import _kill_group;"
            "_kill_group(sys.argv[1]); print('still here')"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(group)],
            start_new_session=True, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == "still here\n", done.stderr
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def a_process() -> Iterator[int]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


# Odd records


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def a_folder(path: Path) -> None:
    path.mkdir()


def much(path: Path) -> None:
    path.write_bytes(b" " * (1 << 20) + b'{"id": "odd", "instance": 0}\n')


def saying(**fields: object) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json.dumps({"id": "odd", "instance": 0, "slot": "s", **fields}) + "\n")

    write.__name__ = "-".join(f"{key}={value!r:.20}" for key, value in fields.items())
    return write


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


ODD = [
    a_fifo, a_link, a_folder, much, deep,
    saying(instance=True), saying(instance=-1), saying(instance="0"), saying(instance=10**30),
    saying(owner="me"), saying(owner={"pid": "x"}), saying(owner={"pid": [1]}),
    saying(created_at="now"), saying(created_at=float("nan")), saying(created_at=1e300),
    saying(labels=["a"]), saying(labels={"a": 1}), saying(config="none"), saying(token=1),
    saying(slot=["s"]), saying(state={}), saying(cgroups="/sys"), saying(cgroups={"memory": 1}),
    saying(init=3), saying(init={"pid": 1.5}),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda one: one.__name__)
async def test_an_odd_record_is_no_reason_to_fail(tmp_path: Path, odd: Callable[[Path], None]):
    state = tmp_path / "state"
    (state / "instances").mkdir(parents=True)
    good = {"id": "good", "instance": 1, "slot": "s", "created_at": 5.0}
    (state / "good.json").write_text(json.dumps(good) + "\n")
    odd(state / "odd.json")
    backend = NativeBackend(Settings(state_dir=str(state), template_build=False))
    async with asyncio.timeout(60):
        assert [info.sandbox_id for info in await backend.list_sandboxes()] == ["good"]
        with pytest.raises(SandboxNotFoundError):
            await backend.usage("odd")
        await backend.destroy("odd")
        assert await backend.sweep() == 1
    assert os.path.lexists(state / "odd.json"), "it may be one that is being written"


# A template is code


def plant_links(settings: Settings, victim: Path) -> Path:
    """Plant links at each path that this user writes to when a template is built or removed."""
    place = template_path("default", settings)
    place.parent.mkdir(parents=True)
    for name in (".default.lock", ".default.failed", f".use-{victim.stat().st_ino}"):
        (place.parent / name).symlink_to(victim)
    place.symlink_to(victim.parent)
    return place.parent


def let_another_own(templates: Path) -> None:
    for one in (templates, *templates.iterdir()):
        os.chown(one, ANOTHER, ANOTHER, follow_symlinks=False)


def let_another_own_what_is_above(templates: Path) -> None:
    os.chown(templates.parent, ANOTHER, ANOTHER)


BUILDING: dict[str, Callable[[Settings], Any]] = {
    "create": lambda settings: create_one(settings),
    "begin": lambda settings: Templates(settings).begin("default"),
    "prepare ahead": lambda settings: find_template("default", settings),
    "template build": lambda settings: asyncio.run(Templates(settings).build("default")),
    "list": lambda settings: Templates(settings).get("default"),
    "remove": lambda settings: Templates(settings).remove("default"),
    "hold": lambda settings: TemplateFiles(templates_dir(settings)).hold(
        template_path("default", settings)
    ),
}


def create_one(settings: Settings) -> None:
    async def create() -> None:
        backend = NativeBackend(settings)
        try:
            await backend.create("x", SandboxConfig(), {})
        finally:
            await backend.close()

    asyncio.run(create())


@needs_root
@pytest.mark.parametrize("work", BUILDING)
@pytest.mark.parametrize(
    "theirs",
    [let_another_own, let_another_own_what_is_above, let_all_write],
    ids=lambda how: how.__name__,
)
def test_nothing_is_built_in_a_directory_of_others(
    tmp_path: Path, work: str, theirs: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    kept = tmp_path / "kept"
    kept.mkdir(0o700)
    victim = kept / "victim"
    victim.write_text("precious")
    settings = Settings(
        state_dir=str(tmp_path / "state"), data_dir=str(tmp_path / "shared/data"), stock=0
    )
    templates = plant_links(settings, victim)
    theirs(templates)
    before = content(templates), content(kept), os.stat(templates), os.stat(kept).st_mode
    with pytest.raises(BackendUnavailableError, match="is not used.*set PARACLE_DATA_DIR"):
        BUILDING[work](settings)
    assert (content(templates), content(kept)) == before[:2]
    assert (os.stat(templates), os.stat(kept).st_mode) == before[2:]


@needs_root
@pytest.mark.parametrize("command", [("list",), ("build", "default"), ("remove", "default")])
def test_the_template_commands_say_whose_the_directory_is(tmp_path: Path, command: tuple[str, ...]):
    templates = tmp_path / "templates"
    templates.mkdir()
    let_another_own(templates)
    done = subprocess.run(
        [sys.executable, "-m", "paracle_sandbox", "template", *command],
        env={**os.environ, "PARACLE_DATA_DIR": str(tmp_path), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0, said
    assert "belongs to user 65534" in said and "PARACLE_DATA_DIR" in said
    assert "Traceback" not in said
    assert list(templates.iterdir()) == []


def test_links_that_were_left_in_a_directory_of_ours_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The directory may have been open to all users before."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    kept = tmp_path / "kept"
    kept.mkdir(0o700)
    victim = kept / "victim"
    victim.write_text("precious")
    settings = Settings(data_dir=str(tmp_path / "data"))
    place = plant_links(settings, victim)
    hidden = place / ".default-planted"
    hidden.symlink_to(kept)
    with pytest.raises(SandboxError, match="PARACLE_DATA_DIR can name another directory"):
        asyncio.run(Templates(settings).build("default"))
    Templates(settings).begin("default")
    files = TemplateFiles(place)
    assert files.failure("default") is None or not (place / ".default.failed").is_symlink()
    files.hide(template_path("default", settings))
    files.remove_unused("default")
    assert victim.read_text() == "precious" and content(kept) == {str(victim): b"precious"}
    assert not os.path.lexists(hidden)


def test_an_empty_directory_that_may_be_another_s_is_not_filled(tmp_path: Path):
    files, built = TemplateFiles(tmp_path), tmp_path / ".default-new"
    for number, odd in enumerate((others_may_write, is_a_link)):
        path = tmp_path / f"default-{number}"
        built.mkdir()
        (built / "module.py").touch()
        odd(path)
        files.publish(built, path, {})
        assert (path / "module.py").exists() and not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o755
    assert list((tmp_path / "own").iterdir()) == []


def test_a_directory_that_root_alone_writes_to_serves_others(tmp_path: Path):
    """One administrator builds templates for all users of a machine."""
    if os.geteuid() != 0:
        pytest.skip("becomes another user: run as root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        os.chmod(shared, 0o755)
        settings = Settings(data_dir=shared)
        place = template_path("default", settings)
        place.mkdir(parents=True)
        (place / MANIFEST).write_text("{}")
        program = (
            "import os, sys\n"
            "from paracle_sandbox.backends.native.templates import Templates\n"
            "from paracle_sandbox.settings import Settings\n"
            "templates = Templates(Settings(data_dir=sys.argv[1]))\n"
            "templates.get('default')  # the interpreter may be one that only root can read\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "templates.begin('default'), templates.hold(templates.get('default'))\n"
            "print(templates.get('default').is_built)"
        )
        command = [sys.executable, "-c", program, shared]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "True\n", done.stderr
        # That they cannot list another's directory does not help: its names can be guessed.
        os.chown(place.parent, ANOTHER - 1, ANOTHER)
        place.parent.chmod(0o711)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "belongs to user 65533" in done.stderr and done.stdout == ""


ODD_FAILURES = [
    '{"reason": "no", "said": "", "at": "x", "is_told": false}',
    '{"reason": 1, "said": "", "at": 1.0, "is_told": false}',
    '{"reason": "no", "at": 1.0}', "[]", "[" * 100_000, '{"reason": "no", "more": 1}', "\xff",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD_FAILURES, ids=lambda text: text[:30])
def test_an_odd_failure_is_none(tmp_path: Path, text: str):
    settings = Settings(data_dir=str(tmp_path), template_build=False)
    directory = templates_dir(settings)
    directory.mkdir()
    (directory / ".default.failed").write_text(text, encoding="latin-1")
    assert TemplateFiles(directory).failure("default") is None
    TemplateFiles(directory).note_failure("default", Failure("no", at=time.time()))
    found = TemplateFiles(directory).failure("default")
    assert found is not None and found.is_recent and found.reason == "no"


@needs_root
async def test_no_template_is_imported_that_another_may_have_planted(tmp_path: Path):
    settings = Settings(
        state_dir=str(tmp_path / "state"), data_dir=str(tmp_path / "data"), template_build=False
    )
    backend = NativeBackend(settings)
    path = backend.templates._path("default")
    path.mkdir(parents=True)
    (path / "json.py").write_text("raise SystemExit('imported')")
    os.chown(path, ANOTHER, ANOTHER)
    with pytest.raises(BackendUnavailableError, match="belongs to user 65534.*PARACLE_DATA_DIR"):
        await backend.create("x", SandboxConfig(), {})
    os.chown(path, 0, 0)
    path.chmod(0o777)
    with pytest.raises(BackendUnavailableError, match="can be written by every user"):
        await backend.create("x", SandboxConfig(), {})
    await backend.close()
