"""Keys, and what separates one user from another."""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from service_process import ServiceProcess
from websockets.sync.client import connect

from paracle_sandbox.errors import SandboxError
from paracle_sandbox.service.errors import BadRequest
from paracle_sandbox.service.keys import Doorman, KeyStore
from paracle_sandbox.service.users.names import Names, checked_user_id

ALIKE = [
    "a.b",
    "a-b",
    "a:b",
    "a_b",
    "a b",
    "A.B",
    "a.b ",
    "ä",
    "a\u0308",
    "日本",
    "x" * 300,
    "x" * 301,
    "CON",
    "me@example.com",
    "%2e",
    "a%2Fb",
    "a/b",
    "a//b",
    "a/b/",
    "CORP\\ann",
    "a\u2215b",
    "a/execute",
    "x/raw",
    "%2e%2e",
    "%252F",
    "+",
    "a+b",
    " ",
    "\u00a0",
    "\u200b",
    "?",
    "#",
    "a?b=c#d",
    "{user_id}",
    "null",
    "0",
    "~",
    "'; DROP TABLE keys; --",
]


@pytest.mark.case("N03")
def test_any_text_is_a_user_of_its_own(fake: ServiceProcess) -> None:
    with fake.client() as client:
        for number, user in enumerate(ALIKE):
            body = {"path": "who.txt", "content": str(number)}
            done = client.post(f"/sandbox/{quote(user, safe='')}/file", json=body)
            assert done.status_code == 200, (user, done.text)
        for number, user in enumerate(ALIKE):
            where = f"/sandbox/{quote(user, safe='')}"
            read = client.get(f"{where}/file", params={"path": "who.txt"}).json()
            assert read["content"] == str(number), user
            client.delete(f"{where}/destroy", params={"erase_files": True})


def raw_post(service: ServiceProcess, path: str, body: bytes = b"") -> bytes:
    """The answer to an address sent as it is: clients would resolve its dots."""
    parts = urlsplit(service.url)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.case("N03")
def test_steps_of_a_path_are_no_users(fake: ServiceProcess) -> None:
    before = users_of(fake)
    for user in (".", "..", "%2E", "%2e%2E", "a%2F..%2Fb", "%2Fa", "..%5Cb", quote("\u2215b")):
        answer = raw_post(fake, f"/sandbox/{user}/shell", b'{"command": "true"}')
        assert b" 400 " in answer.split(b"\r\n")[0], (user, answer)
    assert users_of(fake) <= before, "somebody was let in"


def users_of(service: ServiceProcess) -> set[str]:
    with service.client() as client:
        return {each["user_id"] for each in client.get("/sandboxes").json()["sandboxes"]}


def test_a_user_with_a_slash_has_every_address(fake: ServiceProcess) -> None:
    where = "/sandbox/team%2Fann%3F"
    key = fake.keys("make", "team/ann?")
    with fake.client(key) as client:
        assert client.post(f"{where}/create").json()["user_id"] == "team/ann?"
        assert client.post(f"{where}/execute", json={"code": "print(1)"}).json()["success"]
        body = {"path": "d/f", "content": "x"}
        assert client.post(f"{where}/file", json=body).status_code == 200
        assert client.put(f"{where}/files/raw", params={"path": "r"}, content=b"y").is_success
        assert client.get(f"{where}/files/raw", params={"path": "r"}).content == b"y"
        number = client.post(f"{where}/commands", json={"command": "true"}).json()["command_id"]
        assert client.get(f"{where}/commands/{number}").status_code == 200
        with client.stream("POST", f"{where}/stream", json={"command": "echo s"}) as answer:
            assert b'"text": "s' in answer.read()
        url = f"{fake.url}{where}/ws".replace("http", "ws", 1)
        with connect(url, additional_headers={"X-API-Key": key}) as connection:
            connection.send(json.dumps({"command": "echo w"}))
            assert any('"w' in str(message) for message in connection)
        assert client.get(f"{where}/status").json()["status"] == "running"
        assert client.get("/sandbox/team/status").status_code == 404
        assert client.delete(where).json()["status"] == "deleted"


def test_a_user_that_is_no_text_is_refused(fake: ServiceProcess) -> None:
    for user in ("%FF", "a%C3", "%ED%A0%80", "a%00b", "%0A"):
        assert b" 400 " in raw_post(fake, f"/sandbox/{user}/create").split(b"\r\n")[0], user


@pytest.mark.case("N02")
def test_names_are_injective_and_differ_between_installations(tmp_path: Path) -> None:
    here, there = Names(tmp_path / "a"), Names(tmp_path / "b")
    made = [name for user in ALIKE for name in (here.user_sandbox(user), there.user_sandbox(user))]
    made += [here.own_sandbox("a", "bc"), here.own_sandbox("ab", "c"), here.workspace("a.b")]
    assert len(set(made)) == len(made)
    assert Names(tmp_path / "a").user_sandbox("a.b") == here.user_sandbox("a.b")


@pytest.mark.parametrize("user", ["", "a\0b", "a\nb", "\x1b[2J", "x" * 10_000])
def test_what_is_no_user(user: str) -> None:
    with pytest.raises(BadRequest):
        checked_user_id(user)


@pytest.mark.case("N02")
def test_a_key_acts_only_for_its_users(fake: ServiceProcess) -> None:
    key = fake.keys("make", "ann", "ann.b")
    with fake.client() as admin, fake.client(key) as ann:
        admin.post("/sandbox/bob/file", json={"path": "secret", "content": "bob's"})
        assert ann.post("/sandbox/ann/execute", json={"code": "print(1)"}).json()["success"]
        tried = [
            ann.get("/sandbox/bob/file", params={"path": "secret"}),
            ann.post("/sandbox/bob/file", json={"path": "secret", "content": "ann's"}),
            ann.delete("/sandbox/bob/file", params={"path": "secret"}),
            ann.post("/sandbox/bob/execute", json={"code": "print(1)"}),
            ann.post("/sandbox/bob/shell", json={"command": "true"}),
            ann.post("/sandbox/bob/create"),
            ann.delete("/sandbox/bob/destroy"),
            ann.delete("/sandbox/bob"),
            ann.get("/sandbox/bob/usage"),
            ann.get("/sandbox/bob/files/raw", params={"path": "secret"}),
            ann.put("/sandbox/bob/files/raw", params={"path": "secret"}, content=b"x"),
            ann.post("/sandbox/bob/commands", json={"command": "true"}),
            ann.get("/sandbox/bob/commands"),
            ann.post("/sandbox/bob/stream", json={"command": "true"}),
            ann.post("/sandbox/bob/pip/install", json={"package": "x"}),
        ]
        nobody = ann.get("/sandbox/nobody-at-all/file", params={"path": "secret"})
        assert {answer.status_code for answer in tried} == {404}
        assert {answer.json()["error"] for answer in tried} == {nobody.json()["error"]}
        assert [one["user_id"] for one in ann.get("/sandboxes").json()["sandboxes"]] == ["ann"]
        assert (
            admin.get("/sandbox/bob/file", params={"path": "secret"}).json()["content"] == "bob's"
        )


@pytest.mark.case("N02")
def test_every_address_of_another_user_is_one_of_nobody(fake: ServiceProcess, user: str) -> None:
    """All that the service describes, and not only what somebody thought of."""
    with fake.client() as admin:
        paths = admin.get("/openapi.json").json()["paths"]
        admin.post(f"/sandbox/{user}/file", json={"path": "mark", "content": "kept"})
        with fake.client(fake.keys("make", "alone")) as other:
            found: list[int] = []
            for path, methods in paths.items():
                if "{user_id}" not in path:
                    continue
                answers = [
                    [
                        other.request(method, path.format(user_id=whose, command_id="c"),
                                      params={"path": "mark"}, json=WISH)
                        for whose in (user, "nobody-at-all")
                    ]
                    for method in methods
                ]  # fmt: skip
                for theirs, nobodys in answers:
                    found.append(theirs.status_code)
                    assert (theirs.status_code, theirs.json()["error"]) == (
                        nobodys.status_code, nobodys.json()["error"]
                    ), path  # fmt: skip
                    assert theirs.status_code in (404, 422), (path, theirs.text)
            assert found.count(404) > 20 and len(found) > 25, found
        kept = admin.get(f"/sandbox/{user}/file", params={"path": "mark"}).json()
        assert kept["content"] == "kept"


# Enough for a route that looks at what is asked before it looks at who asks.
WISH = {"command": "true", "path": "mark", "content": "x"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/abc")],
)
@pytest.mark.case("N20")
def test_admin_addresses_need_an_admin_key(fake: ServiceProcess, method: str, path: str) -> None:
    with fake.client(fake.keys("make", "ann")) as ann:
        answer = ann.request(method, path, json={"admin": True} if method == "POST" else None)
        assert (answer.status_code, answer.json()["kind"]) == (403, "denied")


@pytest.mark.case("N01")
def test_a_revoked_or_expired_key_opens_nothing_at_once(fake: ServiceProcess) -> None:
    key = fake.keys("make", "carol")
    with fake.client(key) as carol:
        assert carol.get("/info").status_code == 200
        assert fake.paracle("keys", "revoke", key.split("_")[1]).returncode == 0
        assert carol.get("/info").status_code == 401
    with fake.client() as admin:
        made = admin.post("/keys", json={"users": ["carol"], "expires_in": 0.001}).json()
        time.sleep(0.01)
        with fake.client(made["key"]) as late:
            assert late.get("/info").status_code == 401
        made = admin.post("/keys", json={"users": ["carol"]}).json()
        with fake.client(made["key"]) as now:
            assert now.get("/info").status_code == 200
            assert admin.delete(f"/keys/{made['key_id']}").status_code == 200
            assert now.get("/info").status_code == 401


@pytest.mark.parametrize(
    "wish", [{}, {"users": []}, {"users": [""]}, {"users": ["ann", "../x"]}, {"users": ["a\nb"]}]
)
@pytest.mark.case("N20")
def test_a_key_is_for_somebody(client: httpx2.Client, wish: dict[str, object]) -> None:
    before = client.get("/keys").json()
    refused = client.post("/keys", json=wish)
    assert (refused.status_code, refused.json()["kind"]) == (422, "bad_input"), refused.text
    assert client.get("/keys").json() == before


@pytest.mark.case("N04")
def test_keys_are_stored_hashed(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key = store.make(["ann"], note="for ann")
    stored = (tmp_path / "keys.db").read_bytes()
    secret = key.split("_", 2)[2]
    assert secret.encode() not in stored
    assert (tmp_path / "keys.db").stat().st_mode & 0o077 == 0
    found = store.find(key)
    assert found is not None and found.users == {"ann"} and not found.admin
    for wrong in (key[:-1], key + "x", key.upper(), "", "prc__", secret, key.replace("prc", "pr")):
        assert store.find(wrong) is None, wrong
    with pytest.raises(SandboxError, match="--admin"):
        store.make([])
    assert not store.revoke("nothing")
    store.close()


def test_the_operators_key_is_an_admin_key(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    doorman = Doorman(store, "from the settings")
    caller = doorman.find("from the settings")
    assert caller is not None and caller.admin and caller.may_act_for("anybody")
    assert doorman.find("from the setting") is None
    store.close()


def test_another_process_changes_the_keys_while_we_read(tmp_path: Path) -> None:
    ours, theirs = KeyStore(tmp_path), KeyStore(tmp_path)
    key = theirs.make(admin=True)
    assert ours.find(key) is not None
    theirs.revoke(key.split("_")[1])
    assert ours.find(key) is None
    with sqlite3.connect(tmp_path / "keys.db") as db:
        assert db.execute("SELECT count(*) FROM keys").fetchone() == (1,)
    db.close()
    ours.close()
    theirs.close()


@pytest.mark.case("N14")
def test_a_storm_of_first_requests_makes_one_sandbox(fake: ServiceProcess, user: str) -> None:
    found: list[str] = []

    def create() -> None:
        answer = httpx2.post(
            f"{fake.url}/sandbox/{user}/create", headers={"X-API-Key": fake.key}, timeout=60
        )
        found.append(answer.json()["created_at"] + answer.json()["container_id"])

    threads = [threading.Thread(target=create) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and len(set(found)) == 1


@pytest.mark.case("N02")
def test_two_users_never_see_each_other(native: ServiceProcess) -> None:
    with native.client() as client:
        client.post(
            "/sandbox/eve/shell", json={"command": "echo hers > /workspace/f; echo hers > /tmp/f"}
        )
        look = {"command": "cat /workspace/f /tmp/f; ls /workspace | wc -l"}
        seen = client.post("/sandbox/eve2/shell", json=look).json()
        assert "hers" not in seen["output"] and seen["output"].strip() == "0"
