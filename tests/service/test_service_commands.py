"""The commands around the service: keys, the log as it grows, and what serve says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from service_process import ServiceProcess, wait_until


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    home = ServiceProcess(tmp_path)
    assert "paracle keys make --admin" in home.keys("list")
    key = home.keys("make", "ann", "bob", "--note", "for tests", "--days", "2")
    assert key.startswith("prc_")
    made = json.loads(home.keys("make", "--admin", "--json"))
    listed = {one["key_id"]: one for one in json.loads(home.keys("list", "--json"))}
    ann = listed[key.split("_")[1]]
    assert (ann["users"], ann["admin"], ann["works"]) == (["ann", "bob"], False, True)
    assert listed[made["key_id"]]["admin"] is True
    assert key not in home.keys("list") and "for tests" in home.keys("list")
    assert home.paracle("keys", "revoke", ann["key_id"]).returncode == 0
    again = home.paracle("keys", "revoke", ann["key_id"])
    assert again.returncode == 2 and "keys list" in again.stderr
    listed = {one["key_id"]: one for one in json.loads(home.keys("list", "--json"))}
    assert listed[ann["key_id"]]["works"] is False
    for wrong in (["make"], ["make", "x", "--days", "0"], ["make", "../x"], ["make", ""]):
        done = home.paracle("keys", *wrong)
        assert done.returncode == 2 and done.stderr.startswith("Error: "), done
    log = home.paracle("audit", "show").stdout
    assert "key_made" in log and "key_revoked" in log and key.split("_", 2)[2] not in log


def test_the_log_is_followed_as_it_grows(fake: ServiceProcess, user: str) -> None:
    tail = subprocess.Popen(
        [sys.executable, "-m", "paracle_sandbox", "audit", "tail", "--user", user, "--json"],
        env=fake.env, cwd=fake.home, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert tail.stdout is not None
        with fake.client() as client:
            seen: list[str] = []

            def told() -> bool:
                # Whatever was written before it began to look is not told: so write again.
                client.post(f"/sandbox/{user}/file", json={"path": "f", "content": "x"})
                return _readable(tail.stdout.fileno())  # type: ignore[union-attr]

            wait_until(told, 30)
            seen.append(tail.stdout.readline())
        assert json.loads(seen[0])["user"] == user
    finally:
        tail.terminate()
        tail.wait()
        tail.stdout.close()  # type: ignore[union-attr]


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0.2)[0])


def test_serve_refuses_what_cannot_be(fake: ServiceProcess, tmp_path: Path) -> None:
    port = str(urlsplit(fake.url).port)
    other = ServiceProcess(tmp_path / "a", SANDBOX_MODE="fake", SANDBOX_API_PORT=port)
    done = other.paracle("serve")
    assert (done.returncode, "SANDBOX_API_PORT" in done.stderr) == (3, True), done
    done = other.paracle("serve", "--backend", "remote")
    assert (done.returncode, "--backend native" in done.stderr) == (2, True), done
    for words in (["--backend", "nonsense"], ["--port", "99999"], ["--port", "-1"]):
        done = other.paracle("serve", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done
        assert words[0] in done.stderr, done


def test_a_key_of_the_settings_is_not_shown(tmp_path: Path) -> None:
    service = ServiceProcess(
        tmp_path / "s", SANDBOX_MODE="fake", SANDBOX_API_KEY="an operators key 123"
    ).start()
    try:
        said = "\n".join(service.lines)
        assert "an operators key 123" not in said and '"X-API-Key: $SANDBOX_API_KEY"' in said
        with service.client("an operators key 123") as operator:
            assert operator.get("/metrics").status_code == 200
    finally:
        service.stop()


@pytest.mark.case("N14")
def test_an_idempotent_request_survives_its_client(fake: ServiceProcess, user: str) -> None:
    parts = urlsplit(fake.url)
    body = {"command": "sleep 1; echo run >> log; wc -l < log"}
    raw = json.dumps(body).encode()
    head = (
        f"POST /sandbox/{user}/shell HTTP/1.1\r\nHost: x\r\nX-API-Key: {fake.key}\r\n"
        f"Idempotency-Key: once-{user}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    ).encode()
    with fake.client() as client:
        client.post(f"/sandbox/{user}/create")
        with socket.create_connection((parts.hostname, parts.port)) as connection:
            connection.sendall(head + raw)
            usage = f"/sandbox/{user}/usage"
            wait_until(lambda: client.get(usage).json()["running_executions"] == 1, 30)
        headers = {"Idempotency-Key": f"once-{user}", "Content-Type": "application/json"}
        answers = [
            client.post(f"/sandbox/{user}/shell", content=raw, headers=headers) for _ in range(2)
        ]
        assert [answer.json()["output"].strip() for answer in answers] == ["1", "1"]
