"""Large outputs: the same answers as small ones, without the memory."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest

from paracle_sandbox.errors import ResourceLimitError
from paracle_sandbox.service.users.executions import MAX_OUTPUT
from paracle_sandbox.service.users.spool import IN_MEMORY, Spool, SpooledText, is_large, json_pieces

ODD = 'a"\\\n\x00\x1f\u2028é日😀\ud7ff</script>'


def taken(directory: Path, data: bytes, piece: int, limit: int = 1 << 30) -> Spool:
    spool = Spool(directory, limit, "s")
    for start in range(0, len(data), piece):
        spool.take("stdout", data[start : start + piece])
    return spool


@pytest.mark.parametrize("piece", [7, 4096, 1 << 20])
@pytest.mark.parametrize("size", [0, 10, IN_MEMORY, IN_MEMORY + 1, 1_000_000])
def test_a_text_arrives_as_it_was(tmp_path: Path, size: int, piece: int) -> None:
    data = (ODD.encode() * (size // 10 + 1))[:size]
    spool = taken(tmp_path, data, piece)
    text = spool.text_of("stdout")
    answer = {"output": text, "n": 1, "result": {"stdout": text, "stderr": spool.text_of("stderr")}}
    assert is_large(answer) == isinstance(text, SpooledText) == (size > IN_MEMORY)
    found = json.loads(b"".join(json_pieces(answer)))
    expected = data.decode("utf-8", "replace")
    assert found == {"output": expected, "n": 1, "result": {"stdout": expected, "stderr": ""}}
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    data = b"\xff" * (IN_MEMORY + 1) + b"\xe6\x97"
    answer = {"output": taken(tmp_path, data, 1000).text_of("stdout")}
    assert json.loads(b"".join(json_pieces(answer)))["output"] == data.decode("utf-8", "replace")


def test_too_much_is_refused_and_cut(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100_000, "s")
    spool.take("stdout", b"x" * 60_000)
    with pytest.raises(ResourceLimitError) as refused:
        spool.take("stderr", b"y" * 60_000)
    assert (refused.value.resource_type, refused.value.limit) == ("output", 100_000)
    assert spool.truncated and spool.text_of("stderr") == "y" * 40_000
    spool.close()


def test_a_disk_that_takes_no_more_cuts_it_short(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "nowhere", 1 << 20, "s")
    spool.take("stdout", b"x" * 1000)
    spool.take("stdout", b"x" * IN_MEMORY)
    assert spool.truncated and spool.text_of("stdout") == "x" * 1000


def test_large_outputs_over_http(client: httpx2.Client, user: str) -> None:
    where = f"/sandbox/{user}/shell"
    script = "yes 'line \"é\"' | head -c 1000000; echo >&2 problem; exit 3"
    answer = client.post(where, json={"command": script})
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert (told["success"], told["exit_code"], told["error"]) == (False, 3, "problem\n")
    assert len(told["output"].encode()) == 1_000_000
    assert told["output"] == told["result"]["stdout"]
    assert told["files_kept"] is True
    loud = client.post(where, json={"command": "head -c 300000 /dev/zero >&2; false"}).json()
    assert loud["error"] == loud["result"]["stderr"] and len(loud["error"]) == 300_000
    flood = client.post(where, json={"command": "yes"}).json()
    assert (flood["error_type"], flood["result"]["truncated"]) == ("ResourceLimitError", True)
    assert len(flood["output"]) == MAX_OUTPUT
    slow = {"command": "yes | head -c 500000; sleep 60", "timeout": 2}
    late = client.post(where, json=slow).json()
    assert (late["kind"], len(late["output"]), late["result"]["timed_out"]) == (
        "timeout", 500_000, True,
    )  # fmt: skip
    headers = {"Idempotency-Key": f"{user}-large"}
    twice = [client.post(where, json={"command": script}, headers=headers) for _ in range(2)]
    assert twice[0].json() == twice[1].json()
