"""Requests that are led past the framework: nobody can tell, but by the time they take."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from service_place import KEY, Place

# Anything but this goes the described way.
STRAIGHT = "application/json"
DESCRIBED = "application/json; charset=utf-8"
# What differs from one run of the same program to the next.
PASSING = ("execution_time", "stats")
BODIES = {
    "good": b'{"code": "print(1)"}',
    "with all fields": b'{"code": "print(1)", "description": "one", "timeout": 5}',
    "failing": b'{"code": "import sys; sys.exit(3)"}',
    "stopped": b'{"code": "import time; time.sleep(30)", "timeout": 1}',
    "empty": b"",
    "cut off": b'{"code": "pri',
    "a list": b"[]",
    "null": b"null",
    "no code": b"{}",
    "a number as code": b'{"code": 1}',
    "a text as timeout": b'{"code": "1", "timeout": "5"}',
    "a timeout out of range": b'{"code": "1", "timeout": 100000}',
    "an unknown field": b'{"code": "1", "colour": "blue"}',
    "a field twice": b'{"code": "1", "code": "2"}',
    "not a number": b'{"code": "1", "timeout": NaN}',
    "nested": b'{"code": ' + b"[" * 100 + b"]" * 100 + b"}",
    "bottomless": b'{"code": ' + b"[" * 100_000 + b"}",
    "not UTF-8": b'{"code": "\xff"}',
    "a lone surrogate": b'{"code": "print(1) # \\ud800"}',
}


async def both(place: Place, address: str, body: bytes) -> list[tuple[int, Any, dict[str, str]]]:
    found = []
    for kind in (STRAIGHT, DESCRIBED):
        answer = await place.client.post(address, content=body, headers={"content-type": kind})
        told = {name: value for name, value in answer.json().items() if name not in PASSING}
        headers = {
            name: value
            for name, value in answer.headers.items()
            if name not in ("x-request-id", "content-length")
        }
        found.append((answer.status_code, told, headers))
    return found


@pytest.mark.parametrize("name", BODIES)
async def test_bodies(place: Place, name: str) -> None:
    straight, described = await both(place, "/sandbox/ann/execute", BODIES[name])
    assert straight == described


@pytest.mark.parametrize("user", ["%FF", "%2e%2e", "a%2Fb", "a b", "x" * 300, "", "ann/"])
async def test_users(place: Place, user: str) -> None:
    straight, described = await both(place, f"/sandbox/{user}/shell", b'{"command": "echo 1"}')
    assert straight == described


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


async def test_the_log_tells_of_both_alike(place: Place) -> None:
    before = len(lines(place))
    await both(place, "/sandbox/ann/execute", BODIES["good"])
    straight, described = lines(place)[before:]
    passing = ("n", "time", "hash", "previous", "seconds", "resources")
    assert {k: v for k, v in straight.items() if k not in passing} == {
        k: v for k, v in described.items() if k not in passing
    }
    assert straight["key"] == "operator" and KEY not in str(straight)


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
