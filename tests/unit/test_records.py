"""Tests of the records of native sandboxes: the spawner writes them, the owner adds to them, and
any process reads them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from paracle_sandbox.backends.native import records as records_module
from paracle_sandbox.backends.native.records import RecordStore
from paracle_sandbox.jail.records import Records

SLOT = "slot-0-1"
ONE = {"id": "one", "instance": 0, "slot": SLOT, "owner": {"who": "me"}}
OTHER = {**ONE, "owner": {"who": "another"}}


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path)


@pytest.fixture
def records(tmp_path: Path):
    records = Records(str(tmp_path))
    records.write(SLOT, {"memory": "/groups/1"})
    yield records
    records.close()
    assert [path.name for path in tmp_path.iterdir()] == ["instances"]


def owner(store: RecordStore) -> str | None:
    record = store.find("one")
    return None if record is None else str(record.content["owner"]["who"])


def test_a_child_becomes_a_sandbox_and_keeps_its_record(store, records) -> None:
    assert not store.is_taken("one")
    assert [one.is_sandbox for one in store.all()] == [False]
    store.name(SLOT, "one", ONE)
    assert store.is_taken("one") and owner(store) == "me"
    listed = {one.path.stem: one.is_sandbox for one in store.all()}
    assert listed == {"one": True, SLOT: False}, "one sandbox, however many names"


@pytest.mark.parametrize("torn", [b'{"id": "one", "ins', b'"text"\n', b"\xff\n", b"\n\n", b"{}\n"])
def test_what_is_not_whole_does_not_count(store, records, tmp_path: Path, torn: bytes) -> None:
    store.name(SLOT, "one", ONE)
    with (tmp_path / "one.json").open("ab") as file:
        file.write(torn)
    assert owner(store) == "me"


def test_an_id_is_taken_once(store, records) -> None:
    records.write("slot-0-2", {})
    store.name(SLOT, "one", ONE)
    with pytest.raises(FileExistsError):
        store.name("slot-0-2", "one", OTHER)
    assert owner(store) == "me"


def test_one_whose_child_is_gone_already_is_recorded_all_the_same(store, records) -> None:
    records.remove(SLOT)
    store.name(SLOT, "one", ONE)
    assert owner(store) == "me"
    with pytest.raises(FileExistsError):
        store.name(SLOT, "one", OTHER)
    assert owner(store) == "me"
    store.remove("one", SLOT)


def test_a_file_system_without_second_names(store, records, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.name(SLOT, "one", ONE)
    assert owner(store) == "me"
    with pytest.raises(FileExistsError):
        store.name(SLOT, "one", OTHER)
    store.remove("one", SLOT)


def test_half_a_record_does_not_keep_the_name(store, records, monkeypatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, text: real(fd, text[:5]))
    with pytest.raises(OSError, match="No space"):
        store.name(SLOT, "one", ONE)
    assert not store.is_taken("one")
    (slot,) = store.all()
    assert slot.content["cgroups"] == {"memory": "/groups/1"}


def test_what_was_removed_is_gone_by_one_name(store, records) -> None:
    store.name(SLOT, "one", ONE)
    store.remove("one", SLOT)
    assert owner(store) is None and not store.is_taken("one")
    assert [one.path.stem for one in store.all()] == [SLOT]
    store.remove("one", SLOT)


def test_what_is_another_ones_by_now_is_not_removed(store, records) -> None:
    records.write("slot-0-2", {})
    store.name("slot-0-2", "one", {**OTHER, "slot": "slot-0-2"})
    store.remove("one", SLOT)
    assert owner(store) == "another"


def test_nobody_has_a_slot_of_another(tmp_path: Path) -> None:
    """Not even the process with a reused number has the slot of its predecessor."""
    first = Records(str(tmp_path))
    first_slot, number = first.slot(1), first.instance
    first.close()
    second = Records(str(tmp_path))
    assert second.instance == number and second.slot(1) != first_slot
    second.close()


def test_a_child_is_not_found_by_its_own_name(store, records) -> None:
    store.name(SLOT, "one", ONE)
    assert store.find(SLOT) is None and store.find("one") is not None


def test_no_descriptor_for_it_and_it_is_another_ones(store, records, monkeypatch) -> None:
    store.name(SLOT, "one", ONE)

    def none_left(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        with pytest.raises(OSError, match="too many"):
            store.name("slot-0-2", "one", OTHER)
    assert owner(store) == "me"


@pytest.mark.parametrize("holder", [True, False])
def test_of_a_dead_one_goes_what_was_its_alone(tmp_path: Path, holder: bool) -> None:
    """A living spawner may have its number now, and with it the directory of its groups."""
    state = tmp_path / "state"
    (state / "instances").mkdir(parents=True)
    group = group_of(state, tmp_path / "groups")
    group.mkdir(parents=True)
    dead = {**DEAD, "cgroups": {"memory": str(group)}}
    (state / "one.json").write_text(json.dumps(dead) + "\n")
    living = Records(str(state)) if holder else None
    store = RecordStore(state)
    assert store.sweep() == 1 and not store.is_taken("one")
    assert not group.exists() and group.parent.exists() == holder
    if living is not None:
        assert living.instance == 0
        living.close()


DEAD = {"id": "one", "instance": 0, "token": "dead", "slot": "slot-0-dead-1"}


def group_of(state: Path, hierarchy: Path) -> Path:
    """Return the path where the spawner of a state directory creates the cgroup of a child."""
    about = state.stat()
    spawner = f"{about.st_dev:x}-{about.st_ino:x}-0"
    return hierarchy / "paracle-sandbox" / spawner / "slot-0-dead-1"


@pytest.mark.parametrize("where", ["another", "above", "relative"])
def test_no_other_cgroup_is_touched(tmp_path: Path, where: str, monkeypatch) -> None:
    state = tmp_path / "state"
    (state / "instances").mkdir(parents=True)
    ours = group_of(state, tmp_path)
    places = {
        "another": tmp_path / "another" / "group",
        "above": ours / ".." / ".." / "other" / "slot-0-dead-1",
        "relative": ours.relative_to(tmp_path),
    }
    monkeypatch.chdir(tmp_path)
    ours.mkdir(parents=True)
    places[where].mkdir(parents=True, exist_ok=True)
    dead = {**DEAD, "cgroups": {"memory": str(places[where])}}
    (state / "one.json").write_text(json.dumps(dead) + "\n")
    RecordStore(state).sweep()
    assert places[where].is_dir() and ours.is_dir()


def test_a_cgroup_that_stays_keeps_its_record(tmp_path: Path, monkeypatch) -> None:
    """Otherwise no later sweep would try again."""
    monkeypatch.setattr(records_module, "_SWEEP_SECONDS", 0.0)
    state = tmp_path / "state"
    (state / "instances").mkdir(parents=True)
    group = group_of(state, tmp_path)
    (group / "busy").mkdir(parents=True)
    dead = {**DEAD, "cgroups": {"memory": str(group)}}
    (state / "one.json").write_text(json.dumps(dead) + "\n")
    store = RecordStore(state)
    assert store.sweep() == 0 and store.is_taken("one")
    (group / "busy").rmdir()
    assert store.sweep() == 1 and not store.is_taken("one") and not group.exists()


def test_a_number_whose_holder_changes_meanwhile_is_not_free(tmp_path: Path, monkeypatch) -> None:
    """The file changes between the look at it and the lock.

    The lock is then held on a file that no number has.
    """
    store, living = RecordStore(tmp_path), []
    first = Records(str(tmp_path))
    dead = {"id": "one", "instance": first.instance, "token": "dead"}
    (tmp_path / "one.json").write_text(json.dumps(dead) + "\n")
    real = fcntl.flock

    def change(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and not living:
            living.append(None)
            first.close()
            living[:] = [Records(str(tmp_path))]
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", change)
    store.sweep()
    (second,) = living
    assert second.instance == dead["instance"]
    assert (tmp_path / "instances" / str(second.instance)).exists()
    second.close()
