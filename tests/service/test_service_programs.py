"""Requests that run a program: what each body, user and Content-Type is answered."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from service_place import KEY, Place

_NOT_AN_OBJECT = "body: Input should be a valid dictionary or object to extract fields from"
# The status, and the output or the error.
BODIES: dict[str, tuple[bytes, int, str]] = {
    "good": (b'{"code": "print(1)"}', 200, "1\n"),
    "with all fields": (b'{"code": "print(1)", "description": "one", "timeout": 5}', 200, "1\n"),
    "failing": (
        b'{"code": "import sys; sys.exit(3)"}', 200, "Execution failed with exit code 3",
    ),
    "stopped": (
        b'{"code": "import time; time.sleep(30)", "timeout": 1}', 200,
        "Execution timed out after 1 seconds",
    ),
    "empty": (b"", 422, "body: Field required"),
    "cut off": (b'{"code": "pri', 422, "body.9: JSON decode error"),
    "a list": (b"[]", 422, _NOT_AN_OBJECT),
    "null": (b"null", 422, _NOT_AN_OBJECT),
    "no code": (b"{}", 422, "body.code: Field required"),
    "a number as code": (b'{"code": 1}', 422, "body.code: Input should be a valid string"),
    "a text as timeout": (
        b'{"code": "1", "timeout": "5"}', 422, "body.timeout: Input should be a valid integer",
    ),
    "a timeout out of range": (
        b'{"code": "1", "timeout": 100000}', 422,
        "body.timeout: Input should be less than or equal to 300",
    ),
    "an unknown field": (
        b'{"code": "1", "colour": "blue"}', 422, "body.colour: Extra inputs are not permitted",
    ),
    "a field twice": (
        b'{"code": "1", "code": "2"}', 400, "The JSON cannot be read: a name appears twice",
    ),
    "not a number": (
        b'{"code": "1", "timeout": NaN}', 400, "The JSON cannot be read: NaN is not JSON",
    ),
    "nested": (b'{"code": ' + b"[" * 100 + b"]" * 100 + b"}", 400, "The JSON is nested too deeply"),
    "bottomless": (
        b'{"code": ' + b"[" * 100_000 + b"}", 413,
        "The JSON has more than 65536 bytes outside of strings",
    ),
    "not UTF-8": (b'{"code": "\xff"}', 400, "The JSON is not UTF-8"),
    "a lone surrogate": (
        b'{"code": "print(1) # \\ud800"}', 422,
        "body.code: Input should be a valid string, unable to parse raw data as a unicode string",
    ),
}  # fmt: skip
USERS = {
    "%FF": (400, "The user id is not UTF-8"),
    "%2e%2e": (400, "The user id looks like a path: a slash at its beginning, or . or .."),
    "a%2Fb": (200, "1\n"),
    "a b": (200, "1\n"),
    "x" * 300: (200, "1\n"),
    "": (404, "Not Found"),
    "ann/": (404, "Not Found"),
}


async def ask(place: Place, address: str, body: bytes, kind: str) -> tuple[int, str]:
    answer = await place.client.post(address, content=body, headers={"content-type": kind})
    shown = answer.json()
    return answer.status_code, shown.get("error") or shown["output"]


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
@pytest.mark.parametrize("name", BODIES)
async def test_bodies(place: Place, name: str, kind: str) -> None:
    body, status, text = BODIES[name]
    assert await ask(place, "/sandbox/ann/execute", body, kind) == (status, text)


async def test_a_body_that_is_not_called_json_is_refused(place: Place) -> None:
    body = BODIES["good"][0]
    assert (await ask(place, "/sandbox/ann/execute", body, "text/plain"))[0] == 422


@pytest.mark.parametrize("user", USERS)
async def test_users(place: Place, user: str) -> None:
    body = b'{"command": "echo 1"}'
    assert await ask(place, f"/sandbox/{user}/shell", body, "application/json") == USERS[user]


@pytest.mark.case("N02")
async def test_somebody_elses_sandbox_is_not_there(place: Place) -> None:
    key = place.service.keys.make(["bob"])
    headers = {"X-API-Key": key}
    before = lines(place)
    answer = await place.client.post("/sandbox/ann/shell", json={"command": "id"}, headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (404, "not_found")
    assert [line["reason"] for line in lines(place)[len(before) :]] == ["other_user"]


async def test_a_large_output_is_whole(place: Place) -> None:
    code = "print('x' * 1_000_000)"
    answer = await place.client.post("/sandbox/ann/execute", json={"code": code})
    assert answer.json()["output"] == "x" * 1_000_000 + "\n"


async def test_the_log_tells_of_a_program(place: Place) -> None:
    before = len(lines(place))
    await place.client.post("/sandbox/ann/execute", json={"code": "print(1)"})
    (line,) = lines(place)[before:]
    told = {name: line[name] for name in ("event", "user", "kind", "outcome", "exit_code", "key")}
    assert told == {
        "event": "execution", "user": "ann", "kind": "python", "outcome": "ok", "exit_code": 0,
        "key": "operator",
    }  # fmt: skip
    assert KEY not in str(line)


def lines(place: Place) -> list[dict[str, Any]]:
    from paracle_sandbox.audit.log import read

    return list(read(place.service.journal.log.path))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_loop_is_uvloops_where_that_is_installed(is_there: bool) -> None:
    if is_there:
        pytest.importorskip("uvloop")
    hide = "" if is_there else "sys.modules['uvloop'] = None; "
    code = (
        f"import asyncio, sys; {hide}"
        "from paracle_sandbox.service.server import loop_factory\n"
        "async def name(): return type(asyncio.get_running_loop()).__module__\n"
        "with asyncio.Runner(loop_factory=loop_factory()) as runner: print(runner.run(name()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("uvloop" if is_there else "asyncio.")
