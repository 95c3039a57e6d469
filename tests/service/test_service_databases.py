"""The service's databases may be locked by another process, or slow: the service goes on."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from service_process import ServiceProcess

Ask = Callable[[httpx2.Client, str], httpx2.Response]


def run_once(client: httpx2.Client, user: str) -> httpx2.Response:
    headers = {"Idempotency-Key": user}
    body = {"command": "echo hi"}
    return client.post(f"/sandbox/{user}/shell", json=body, headers=headers)


def make_key(client: httpx2.Client, user: str) -> httpx2.Response:
    return client.post("/keys", json={"users": [user]})


@contextmanager
def locked(file: Path) -> Iterator[None]:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.parametrize(("file", "ask"), [("answers.db", run_once), ("keys.db", make_key)])
def test_others_are_answered_while_a_database_is_locked(
    fake: ServiceProcess, user: str, file: str, ask: Ask
) -> None:
    answers: list[httpx2.Response] = []

    def asked() -> None:
        with fake.client() as client:
            answers.append(ask(client, user))

    with fake.client() as client:
        with locked(fake.data / file):
            asking = threading.Thread(target=asked)
            asking.start()
            for _ in range(20):
                assert client.get("/info").status_code == 200
            assert not answers
        asking.join()
        assert answers[0].is_success
        if ask is run_once:
            assert run_once(client, user).json() == answers[0].json(), "it was kept"


def test_a_key_that_another_process_makes_or_revokes_counts_at_once(
    fake: ServiceProcess, user: str
) -> None:
    key = fake.keys("make", user)
    with fake.client(key) as client:
        assert client.get("/info").status_code == 200
        fake.keys("revoke", key.split("_")[1])
        assert client.get("/info").status_code == 401
