"""WebSockets: programs that are fed while they run, and terminals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from service_process import ServiceProcess, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect


def dial(service: ServiceProcess, path: str, key: str | None = None) -> ClientConnection:
    headers = {"X-API-Key": service.key if key is None else key}
    return connect(service.url.replace("http", "ws", 1) + path, additional_headers=headers)


def told(socket: ClientConnection) -> list[dict[str, Any]]:
    """Everything until the service hangs up."""
    found = []
    try:
        while True:
            found.append(json.loads(socket.recv(timeout=30)))
    except ConnectionClosed:
        return found


def test_a_program_is_fed_and_followed(fake: ServiceProcess, user: str) -> None:
    with dial(fake, f"/sandbox/{user}/ws") as socket:
        code = "name = input('? ')\nprint('hello', name)"
        socket.send(json.dumps({"code": code, "keep_stdin": True}))
        socket.send(json.dumps({"stdin": "world\n"}))
        events = told(socket)
    assert events[0]["event"] == "start"
    assert "".join(e["text"] for e in events if e["event"] == "stdout") == "? hello world\n"
    expected = {"event": "result", "success": True, "exit_code": 0, "files_kept": True}
    assert events[-1] == expected


@pytest.mark.parametrize("wish", [{}, {"stdin": "all there is\n"}])
def test_input_that_cannot_reach_the_program_is_refused(
    fake: ServiceProcess, user: str, wish: dict[str, str]
) -> None:
    with dial(fake, f"/sandbox/{user}/ws") as socket:
        socket.send(json.dumps({"command": "sleep 300", **wish}))
        socket.send(json.dumps({"stdin": "world\n"}))
        last = told(socket)[-1]
    assert last["event"] == "error"
    assert "keep_stdin" in last["error"]


def test_a_program_is_signalled(fake: ServiceProcess, user: str) -> None:
    with dial(fake, f"/sandbox/{user}/ws") as socket:
        socket.send(json.dumps({"command": "echo up; exec sleep 300"}))
        while json.loads(socket.recv(timeout=30))["event"] != "stdout":
            pass
        socket.send(json.dumps({"signal": 15}))
        assert told(socket)[-1]["exit_code"] == -15


@pytest.mark.parametrize(
    "message", ["not json", "[]", "{}", '{"code": "1", "command": "1"}', '{"code": "1", "x": 1}',
                '{"code": "1", "code": "2"}', '{"code": "1", "timeout": NaN}', "[" * 5000]
)  # fmt: skip
def test_a_message_that_makes_no_sense_is_told_so(
    fake: ServiceProcess, user: str, message: str
) -> None:
    with dial(fake, "/sandbox/odd/ws") as socket:
        socket.send(message)
        events = told(socket)
    assert [event["event"] for event in events] == ["error"]
    assert events[0]["error"] and "\n" not in events[0]["error"]
    log = fake.paracle("audit", "show", "--user", "odd", "--event", "refused").stdout
    assert "bad_input" in log


def test_a_terminal_shows_types_resizes_and_ends(fake: ServiceProcess, user: str) -> None:
    with dial(fake, f"/sandbox/{user}/terminal?rows=30&columns=100&command=sh") as socket:
        socket.send(b"stty size\n")
        shown = b""
        while b"30 100" not in shown:
            part = socket.recv(timeout=30)
            shown += part if isinstance(part, bytes) else part.encode()
        socket.send(json.dumps({"resize": [40, 120]}))
        socket.send(b"stty size; exit 7\n")
        last: Any = b""
        while isinstance(last, bytes):
            shown += last
            last = socket.recv(timeout=30)
    assert b"40 120" in shown
    assert json.loads(last)["exit_code"] == 7


@pytest.mark.parametrize("path", ["ws", "terminal"])
@pytest.mark.case("N01", "N02", "N15")
def test_no_socket_without_a_key_or_for_another_user(fake: ServiceProcess, path: str) -> None:
    key = fake.keys("make", "alone")
    for given, user, status in (("", "alone", 401), ("wrong", "alone", 401), (key, "other", 404)):
        with pytest.raises(InvalidStatus) as refusal:
            dial(fake, f"/sandbox/{user}/{path}", given)
        assert refusal.value.response.status_code == status
    with dial(fake, "/sandbox/alone/ws", key) as socket:
        socket.send(json.dumps({"command": "echo mine"}))
        assert told(socket)[-1]["success"]


def statuses(service: ServiceProcess, key: str, *paths: str, user: str = "") -> list[int]:
    """What each WebSocket is answered that must not open."""
    found = []
    headers = {"X-API-Key": key, **({"X-Sandbox-User": user} if user else {})}
    for path in paths:
        with pytest.raises(InvalidStatus) as refused:
            connect(service.url.replace("http", "ws", 1) + path, additional_headers=headers)
        found.append(refused.value.response.status_code)
    return found


@pytest.mark.case("N02", "N15")
def test_a_channel_is_resumed_by_its_owner_alone(fake: ServiceProcess, user: str) -> None:
    """There is no token to guess: whose channel it is, the key says, each time anew. Neither the
    id that its owner chose, nor the backend's own, nor a count of bytes opens it for another."""
    hers, his = fake.keys("make", f"{user}-ann"), fake.keys("make", f"{user}-bob")
    channel = "/v1/sandboxes/hers/channel"
    with fake.client(hers) as ann, fake.client(his) as bob:
        assert ann.post("/v1/sandboxes", json={"sandbox_id": "hers"}).status_code == 201
        log = fake.paracle("audit", "show", "--user", f"{user}-ann", "--json").stdout
        (name,) = {
            line["sandbox_id"]
            for line in map(json.loads, log.splitlines())
            if line["event"] == "create"
        }
        tried = [
            *(f"{channel}?received={count}" for count in ("0", "1", "18446744073709551615")),
            f"/v1/sandboxes/{name}/channel",
            "/v1/sandboxes/nobodys/channel",
        ]
        with dial(fake, channel, hers):
            assert statuses(fake, his, *tried) == [404] * len(tried), "while she holds it"
        # She may come back: until then it waits, for her.
        assert statuses(fake, his, *tried) == [404] * len(tried)
        assert statuses(fake, his, channel, user=f"{user}-ann") == [404]
        assert statuses(fake, "", channel) == [401]
        for sandbox in ("hers", name):
            assert bob.get(f"/v1/sandboxes/{sandbox}/usage").status_code == 404
            assert bob.delete(f"/v1/sandboxes/{sandbox}").json()["status"] == "not_found"
        assert bob.get("/v1/sandboxes").json()["sandboxes"] == []
        with dial(fake, f"{channel}?received=0", hers):
            pass
        assert fake.paracle("keys", "revoke", hers.split("_")[1]).returncode == 0
        assert statuses(fake, hers, channel) == [401], "its key is gone"
    with fake.client() as admin:
        gone = admin.delete("/v1/sandboxes/hers", headers={"X-Sandbox-User": f"{user}-ann"})
        assert gone.json()["status"] == "deleted", "it was there all the time"


@pytest.mark.case("N02", "N15")
def test_a_command_is_followed_by_its_owner_alone(fake: ServiceProcess, user: str) -> None:
    """Its number is 128 random bits or more, and is nothing in the hands of others."""
    ann, bob = f"{user}-ann", f"{user}-bob"
    hers, his = fake.keys("make", ann), fake.keys("make", bob)
    with fake.client(hers) as owner, fake.client(his) as other:
        body = {"command": "echo secret; exec sleep 300"}
        number = owner.post(f"/sandbox/{ann}/commands", json=body).json()["command_id"]
        assert len(number) >= 22
        assert other.post(f"/sandbox/{bob}/shell", json={"command": "true"}).is_success
        for there in (ann, bob):
            where = f"/sandbox/{there}/commands/{number}"
            answers = [
                other.get(where),
                other.get(f"{where}/stream"),
                other.post(f"{where}/signal", json={"signal": 9}),
                other.get(f"/sandbox/{there}/commands/{number[:-1]}/stream"),
            ]
            assert [answer.status_code for answer in answers] == [404] * 4, answers
            assert not any("secret" in answer.text for answer in answers)
        assert owner.get(f"/sandbox/{ann}/commands/{number}").json()["running"] is True
        owner.delete(f"/sandbox/{ann}")


@pytest.mark.case("N14")
def test_who_hangs_up_ends_the_program(native: ServiceProcess, user: str) -> None:
    with dial(native, f"/sandbox/{user}/ws") as socket:
        socket.send(json.dumps({"command": "echo up; sleep 300"}))
        while json.loads(socket.recv(timeout=30))["event"] != "stdout":
            pass
    with native.client() as client:
        usage = f"/sandbox/{user}/usage"
        wait_until(lambda: client.get(usage).json()["running_executions"] == 0, 30)
        look = {"command": "cat /proc/[0-9]*/comm"}
        assert "sleep" not in client.post(f"/sandbox/{user}/shell", json=look).json()["output"]
