"""Answers that are kept for requests that are sent twice: whose they are, and for how long."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_place import Place

from paracle_sandbox.service.keys import Caller
from paracle_sandbox.service.middleware.idempotency import Idempotency
from paracle_sandbox.service.middleware.idempotency_store import (
    IN_FILE,
    IN_MEMORY,
    Answers,
    RequestIdentity,
)

CALLER = Caller("key", frozenset({"somebody-else"}))
DAY = 86_400.0


def asked(key: str, owner: str = "ann") -> RequestIdentity:
    return RequestIdentity(key.encode(), owner.encode(), b"hash")


def run(kept: Answers, key: str, owner: str = "ann", body: bytes = b"answer") -> None:
    kept.begin(asked(key, owner))
    kept.complete(asked(key, owner), 200, [], body)


def has(kept: Answers, key: str) -> bool:
    found = kept.find(key.encode())
    return found is not None and found.status == 200


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def test_nobody_drives_out_the_answers_of_others(tmp_path: Path) -> None:
    kept = Answers(tmp_path, room=replace(IN_FILE, answers_of_one=20, size_of_one=10_000))
    run(kept, "hers")
    for number in range(100):
        run(kept, f"his-{number}", "mallory")
    run(kept, "large", "mallory", b"x" * 20_000)
    assert has(kept, "hers")
    assert not has(kept, "his-0") and not has(kept, "his-99") and not has(kept, "large")
    run(kept, "his-last", "mallory")
    assert has(kept, "his-last")


def test_where_all_have_too_much_the_largest_gives(tmp_path: Path) -> None:
    small = replace(IN_FILE, answers=30)
    kept = Answers(tmp_path, room=small)
    for number in range(3):
        run(kept, f"hers-{number}")
    for number in range(100):
        run(kept, f"his-{number}", "mallory")
    kept.close()
    kept = Answers(
        tmp_path, room=small
    )  # what counts is in the file, not in the memory of one service
    run(kept, "his-last", "mallory")
    assert all(has(kept, f"hers-{number}") for number in range(3))
    kept.close()


def test_an_answer_is_kept_for_a_day(tmp_path: Path) -> None:
    clock = Clock()
    kept = Answers(tmp_path, clock)
    run(kept, "first")
    clock.now += DAY - 10
    assert has(kept, "first")
    clock.now += 20
    assert not has(kept, "first")
    # One that takes more than a day, or whose beginning was not written, is kept all the same.
    kept.begin(asked("long"))
    clock.now += 2 * DAY
    kept.complete(asked("long"), 200, [], b"at last")
    kept.complete(asked("unwritten"), 200, [], b"")
    assert has(kept, "long") and has(kept, "unwritten")
    kept.close()


def test_what_ends_with_the_service_takes_little_memory() -> None:
    """Each sandbox that a remote client makes is such an answer."""
    clock = Clock()
    kept = Answers(None, clock)
    for number in range(2 * IN_MEMORY.answers_of_one):
        run(kept, f"one-{number}")
    assert kept.count <= IN_MEMORY.answers_of_one
    for number in range(2 * IN_MEMORY.answers):
        run(kept, f"all-{number}", f"owner-{number}")
    assert kept.count <= IN_MEMORY.answers and has(kept, f"all-{number}")
    clock.now += IN_MEMORY.seconds + 100
    run(kept, "last")
    assert kept.count == 1


def test_a_clock_that_is_set_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Answers(tmp_path)
    run(kept, "first")
    for jump in (10 * DAY, -10 * DAY):
        monkeypatch.setattr("time.time", lambda jump=jump: 1e9 + jump)
        assert has(kept, "first")
        run(kept, f"after-{jump}")
        assert has(kept, "first") and has(kept, f"after-{jump}")
    kept.close()


def test_a_file_of_an_older_service_is_taken_over(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "answers.db") as db:
        db.execute(
            "CREATE TABLE answers (key BLOB PRIMARY KEY, body_hash BLOB NOT NULL, made REAL NOT"
            " NULL, status INTEGER, headers TEXT, body BLOB, size INTEGER NOT NULL DEFAULT 0)"
        )
        db.execute(
            "INSERT INTO answers VALUES (?, ?, strftime('%s'), 200, '[]', ?, 3)",
            (b"old", b"hash", b"abc"),
        )
    kept = Answers(tmp_path)
    assert has(kept, "old")
    run(kept, "new")
    kept.close()


async def _post(place: Place, path: str, body: dict[str, Any], key: str) -> Any:
    return await place.client.post(path, json=body, headers={"Idempotency-Key": key})


def spellings(user: str) -> Iterator[str]:
    """All that it can be in an address: each letter as it is, or encoded."""
    for letters in itertools.product(*((letter, f"%{ord(letter):02x}") for letter in user)):
        yield "".join(letters)


@pytest.mark.parametrize("where", ["header", "path"])
async def test_one_user_is_one_owner(where: str) -> None:
    """However often its name is spelled anew, it has the room of one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    kept = Answers(None)
    repeated = Idempotency(app, kept)
    for number, spelling in enumerate(itertools.islice(spellings("somebody-else"), 600)):
        headers = [(b"idempotency-key", b"%d" % number)]
        path = "/v1/sandboxes"
        if where == "header":
            headers.append((b"x-sandbox-user", spelling.encode()))
        else:
            path = f"/sandbox/{spelling}/shell"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await repeated({**scope, "state": {"caller": CALLER}}, receive, send)
    counted = repeated._unkept if where == "header" else kept
    assert 0 < counted.count <= IN_MEMORY.answers_of_one
    counted.close()


async def test_a_user_in_a_header_is_the_same_in_every_spelling(place: Place) -> None:
    key = place.service.keys.make(["ann", "bob"])
    made = [
        await place.client.post(
            "/v1/sandboxes", json={"sandbox_id": "hers"},
            headers={"X-API-Key": key, "X-Sandbox-User": user, "Idempotency-Key": "once"},
        )
        for user in ("ann", "%61nn", "bob")
    ]  # fmt: skip
    assert [one.status_code for one in made] == [201, 201, 201]
    assert made[1].json() == made[0].json()
    assert [len(place.service.leases.all(user)) for user in ("ann", "bob")] == [1, 1]


async def test_what_did_nothing_is_not_kept(place: Place) -> None:
    """It takes no room, and runs when it can."""
    nowhere = await _post(place, "/sandbox/ann/nowhere", {}, "k")
    assert nowhere.status_code == 404
    wrong = await _post(place, "/sandbox/ann/shell", {"command": 3}, "k")
    assert wrong.status_code == 422
    right = await _post(place, "/sandbox/ann/shell", {"command": "echo run >> log"}, "k")
    assert right.status_code == 200, "the key is free: nothing has run under it"
    again = await _post(place, "/sandbox/ann/shell", {"command": "echo run >> log"}, "k")
    assert again.json() == right.json()
    assert (await place.shell("cat log"))["output"] == "run\n"


async def test_a_full_disk_makes_no_request_fail(place: Place) -> None:
    """The answer of one that ran is given, though its beginning could not be kept."""
    database = place.service.answers._db
    inside = Path(place.backend.directory_of(place.service.sandboxes.sandbox_id("ann")))
    database.execute("PRAGMA query_only = ON")  # as a full disk does: it reads, and writes nothing
    body = {"command": "touch up; while [ ! -e go ]; do sleep 0.01; done; echo ran"}
    running = asyncio.create_task(_post(place, "/sandbox/ann/shell", body, "full"))
    while not (inside / "up").exists():
        await asyncio.sleep(0.01)
    database.execute("PRAGMA query_only = OFF")
    (inside / "go").touch()
    ran = await running
    assert (ran.status_code, ran.json()["output"]) == (200, "ran\n")
    assert (await _post(place, "/sandbox/ann/shell", body, "full")).json() == ran.json()
