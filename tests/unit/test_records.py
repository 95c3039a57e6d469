"""The records of native sandboxes, as the owner writes and anybody reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paracle_sandbox.backends.native.records import RecordStore

FIRST = {"id": "one", "instance": 1, "state": "creating"}
LATER = {**FIRST, "state": "running", "slot": "slot-1-1"}


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path)


def state(store: RecordStore) -> str | None:
    record = store.find("one")
    return None if record is None else str(record.content["state"])


def test_what_was_added_last_counts(store: RecordStore) -> None:
    store.write_new("one", FIRST)
    assert state(store) == "creating"
    store.complete("one", LATER)
    assert state(store) == "running"
    assert [record.content for record in store.all()] == [LATER]


@pytest.mark.parametrize("torn", [b'{"id": "one", "ins', b'"text"\n', b"\xff\n", b"\n\n", b"{}\n"])
def test_what_is_not_whole_does_not(store: RecordStore, tmp_path: Path, torn: bytes) -> None:
    store.write_new("one", FIRST)
    with (tmp_path / "one.json").open("ab") as file:
        file.write(torn)
    assert state(store) == "creating"


def test_an_id_is_taken_once(store: RecordStore) -> None:
    store.write_new("one", FIRST)
    with pytest.raises(FileExistsError):
        store.write_new("one", LATER)
    assert state(store) == "creating"


def test_what_was_removed_meanwhile_does_not_come_back(store: RecordStore) -> None:
    store.write_new("one", FIRST)
    store.remove("one")
    with pytest.raises(FileNotFoundError):
        store.complete("one", LATER)
    assert state(store) is None
