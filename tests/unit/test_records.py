"""The records of native sandboxes: the spawner writes them, the owner adds, anybody reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paracle_sandbox.backends.native.records import RecordStore
from paracle_sandbox.jail.records import Records

SLOT = "slot-0-1"
ONE = {"id": "one", "instance": 0, "slot": SLOT, "owner": "me"}
OTHER = {**ONE, "owner": "another"}


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
    return None if record is None else str(record.content["owner"])


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
    records.remove("slot-0-2")


def test_one_whose_child_is_gone_already_is_recorded_all_the_same(store, records) -> None:
    records.remove(SLOT)
    store.name(SLOT, "one", ONE)
    assert owner(store) == "me"
    with pytest.raises(FileExistsError):
        store.name(SLOT, "one", OTHER)
    assert owner(store) == "me"
    store.remove("one")


def test_a_file_system_without_second_names(store, records, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.name(SLOT, "one", ONE)
    assert owner(store) == "me"
    with pytest.raises(FileExistsError):
        store.name(SLOT, "one", OTHER)
    store.remove("one")


def test_half_a_record_does_not_keep_the_name(store, records, monkeypatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, text: real(fd, text[:5]))
    with pytest.raises(OSError, match="No space"):
        store.name(SLOT, "one", ONE)
    assert not store.is_taken("one")
    (slot,) = store.all()
    assert slot.content["cgroups"] == {"memory": "/groups/1"}


def test_who_takes_a_dead_ones_slot_leaves_what_is_known_of_its_sandbox(store, records) -> None:
    """Its number was free, and it was not swept yet: by the name of the sandbox it can still be."""
    store.name(SLOT, "one", ONE)
    records.write(SLOT, {"memory": "/groups/2"})
    assert owner(store) == "me"
    found = {one.path.stem: one.content.get("cgroups") for one in store.all()}
    assert found[SLOT] == {"memory": "/groups/2"}


def test_what_was_removed_does_not_come_back(store, records) -> None:
    store.name(SLOT, "one", ONE)
    store.remove("one")
    assert owner(store) is None and not store.is_taken("one")
    assert [one.path.stem for one in store.all()] == [SLOT]
