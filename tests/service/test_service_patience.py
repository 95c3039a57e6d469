"""Clients that read nothing, send slowly, or keep what they have open after their key has ended."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx2
import pytest
from served import Served, head, served, until
from service_place import KEY
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from paracle_sandbox.service.connections.budget import Budget
from paracle_sandbox.service.connections.slow_clients import Patience
from paracle_sandbox.service.middleware.body_limits import MAX_BODY, MAX_SMALL_BODY, JsonScan

LITTLE = 4096
BIG = 3 << 20
UPGRADE = (
    "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)  # fmt: skip
SOON = Patience(stall_seconds=0.5, look_seconds=0.05, stall_bytes=LITTLE)


async def big_file(place: Served) -> bytes:
    """The request for a file whose answer, six bytes for each, fits into no socket's buffer."""
    async with place.client() as client:
        answer = await client.put("/sandbox/ann/files/raw?path=big", content=b"\x01" * BIG)
        assert answer.status_code == 200
    return head("GET", "/sandbox/ann/file?path=big")


@pytest.mark.parametrize("times", [1, 20], ids=["one answer", "pipelined"])
@pytest.mark.case("N06")
async def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path, times: int) -> None:
    """V4: also when its requests are answered as far as the application knows."""
    async with served(tmp_path, SOON) as place:
        request = await big_file(place)
        await until(lambda: place.connections == 0)
        with place.dial(LITTLE) as lazy:
            lazy.send(request * times)
            await until(lambda: place.server.slow_clients.total > 0)
            await until(lambda: place.connections == 0)
            assert place.server.slow_clients.total == 0
            assert place.refused("unread") == 1


async def test_what_is_sent_before_a_key_is_cut_off_as_well(tmp_path: Path) -> None:
    async with served(tmp_path, SOON) as place:
        with place.dial(LITTLE) as lazy:
            await pour(lazy, head("GET", "/health", key="wrong") * 1000, place)
        assert place.connections == 0


async def pour(connection: socket.socket, data: bytes, place: Served) -> None:
    """Send on and on, and read nothing, until the connection is gone."""
    await until(lambda: place.connections == 1)
    while place.connections:
        try:
            connection.send(data)
        except BlockingIOError:
            await asyncio.sleep(0.01)
        except OSError:
            return


async def test_a_slow_reader_gets_all_of_it(tmp_path: Path) -> None:
    """Much slower than the time in which one that takes nothing is cut off."""
    patience = Patience(stall_seconds=2.0, look_seconds=0.05, stall_bytes=LITTLE)
    async with served(tmp_path, patience) as place:
        request = await big_file(place)
        with place.dial(LITTLE) as slow:
            slow.send(request)
            await until(lambda: place.server.slow_clients.total > 0)
            begun, got = time.monotonic(), 0
            while got < 6 * BIG:
                try:
                    got += len(slow.recv(64 << 10))
                except BlockingIOError:
                    await asyncio.sleep(0)
                if time.monotonic() - begun < 3.0:  # longer than it may stall
                    await asyncio.sleep(0.05)
        assert place.refused("unread") == 0


@pytest.mark.parametrize("share", ["of a key", "of all"])
async def test_unread_answers_have_one_budget(tmp_path: Path, share: str) -> None:
    """Long before anybody's patience is at its end."""
    room = 1 << 20
    limits = {"of a key": {"unsent_bytes_per_key": room}, "of all": {"unsent_bytes": room}}
    async with served(tmp_path, Patience(**limits[share])) as place:  # type: ignore[arg-type]
        request = await big_file(place)
        lazy = [place.dial(LITTLE) for _ in range(8)]
        try:
            for connection in lazy:
                connection.send(request)
            await until(lambda: place.refused("unread") >= 3)
            assert 0 < place.server.slow_clients.total <= room
            async with place.client() as client:
                assert (await client.get("/info")).status_code == 200
        finally:
            for connection in lazy:
                connection.close()
        await until(lambda: place.connections <= 1)


async def test_the_place_of_one_that_does_not_read_is_anothers(tmp_path: Path) -> None:
    patience = Patience(max_connections=8)
    async with served(tmp_path, patience) as place:
        request = await big_file(place)
        lazy = [place.dial(LITTLE) for _ in range(8)]
        try:
            for connection in lazy:
                connection.send(request)
            await until(lambda: place.connections == 8 and place.server.slow_clients.total > 0)
            for _ in range(20):
                async with place.client() as client:
                    assert (await client.get("/info")).status_code == 200
        finally:
            for connection in lazy:
                connection.close()


async def test_unread_requests_are_counted_until_they_are_gone(tmp_path: Path) -> None:
    async with served(tmp_path) as place:
        request = await big_file(place)
        gate = place.gate
        with place.dial(LITTLE) as lazy:
            lazy.send(request)
            await until(lambda: place.server.slow_clients.total > 0)
            assert gate._open["operator"] == 1
        await until(lambda: not gate._open["operator"])


async def test_pings_are_answered_as_far_as_the_answers_are_read(tmp_path: Path) -> None:
    async with served(tmp_path) as place:
        with place.dial(LITTLE) as lazy:
            lazy.send(head("GET", "/sandbox/ann/ws", *UPGRADE))
            ping = b"\x89\xfd" + b"\0" * 4 + b"p" * 125
            await pour(lazy, ping * 1000, place)


@pytest.mark.parametrize("kind", [b"\x89", b"\x8a"], ids=["pings", "pongs"])
async def test_empty_pings_are_answered_up_to_a_number(tmp_path: Path, kind: bytes) -> None:
    """However fast the answers are read: one read has room for forty thousand of them."""
    ping = b"\x89\x80\0\0\0\0"
    async with served(tmp_path) as place:
        loop = asyncio.get_running_loop()
        with place.dial() as pinging:
            pinging.send(head("GET", "/sandbox/ann/ws", *UPGRADE))
            await until_read(pinging, b"101 ")
            pinging.send(ping * 900)
            pongs = b""
            while len(pongs) < 1800:
                pongs += await asyncio.wait_for(loop.sock_recv(pinging, 4096), 60)
            assert pongs == b"\x8a\0" * 900
            pongs = b""
            with suppress(ConnectionError):
                await loop.sock_sendall(pinging, (kind + ping[1:]) * 40_000 + ping)
                while got := await asyncio.wait_for(loop.sock_recv(pinging, 1 << 20), 60):
                    pongs += got
            assert len(pongs) // 2 <= (1000 if kind == ping[:1] else 0)
        await until(lambda: place.connections == 0)


async def test_small_messages_wait_in_the_kernel(tmp_path: Path) -> None:
    """V5: what the application does not take yet is a few messages, however small they are."""
    async with served(tmp_path) as place:
        address = f"ws://127.0.0.1:{place.port}/sandbox/ann/ws"
        async with connect(address, additional_headers={"X-API-Key": KEY}) as socket_:
            await socket_.send('{"command": "cat", "keep_stdin": true}')
            await socket_.recv()
            for _ in range(5000):
                await socket_.send('{"stdin": "x"}')
            await socket_.send('{"close_stdin": true}')
            told = ""
            while '"exit_code"' not in told:
                told = str(await socket_.recv())
        assert '"exit_code": 0' in told


async def test_what_is_begun_and_never_ends_has_one_budget(tmp_path: Path) -> None:
    """V5: halves of messages, and heads of requests without a key."""
    room = 1 << 20
    patience = Patience(unread_bytes_per_key=room, header_seconds=300.0)
    begun = [
        head("GET", "/sandbox/ann/ws", *UPGRADE),
        b"\x82\xff" + (1 << 20).to_bytes(8, "big") + b"\0" * 4 + b"x" * (600 << 10),
    ]
    loop = asyncio.get_running_loop()
    async with served(tmp_path, patience) as place:
        unread = place.server.slow_clients.unread
        with place.dial() as one, place.dial() as two:
            for connection in (one, two):
                await loop.sock_sendall(connection, begun[0])
                await until_read(connection, b"101 ")
                with suppress(OSError):
                    await loop.sock_sendall(connection, begun[1])
            await until(lambda: place.refused("unread") == 1)
            assert unread.total <= room
        await until(lambda: unread.total == 0)
        lazy = [place.dial() for _ in range(20)]
        for connection in lazy:
            with suppress(OSError):
                await loop.sock_sendall(connection, b"GET / HTTP/1.1\r\nX: " + b"x" * 60_000)
        await until(lambda: place.refused("unread") > 1)
        assert unread.total <= room
        for connection in lazy:
            connection.close()
        await until(lambda: unread.total == 0)


async def until_read(connection: socket.socket, text: bytes) -> None:
    got = b""
    while text not in got:
        got += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 4096), 60)


@pytest.mark.case("N06")
async def test_a_body_has_so_much_time_in_all(tmp_path: Path) -> None:
    """V5: not for each piece of it."""
    async with served(tmp_path) as place:
        place.gate._body_seconds = 1.0
        with place.dial() as drip:
            drip.send(head("POST", "/sandbox/ann/execute", "Content-Length: 100000"))
            answer = b""
            while not answer.endswith(b"}"):
                try:
                    drip.send(b" ")
                    await asyncio.sleep(0.05)
                    answer += drip.recv(65536)
                except BlockingIOError:
                    continue
            assert answer.startswith(b"HTTP/1.1 408"), answer
        await until(lambda: place.connections == 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" + b"0," * 4_000_000 + b"0]", 413),
        (b"[" + b'"",' * 2_500_000 + b'""]', 413),
        (b"{" + b'"a":1,' * 1_300_000 + b'"a":1}', 413),
        (b'{"x":1.' + b"1" * 8_000_000 + b"}", 413),
        (b'{"code": "' + b"\\\\\\u0022," * 500_000 + b'"}', 200),
        (b'{"code": "#' + b"x,[{}]:1" * 1_000_000 + b'"}', 422),
    ],
    ids=["numbers", "strings", "fields", "one number", "escapes", "one string"],
)
@pytest.mark.case("N08")
async def test_what_json_contains_is_limited_before_it_is_read(
    tmp_path: Path, body: bytes, status: int
) -> None:
    """V2: no object is made of a body with more in it than a request has."""
    async with served(tmp_path) as place, place.client() as client:
        answer = await client.post(
            "/sandbox/ann/execute", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == status, answer.text[:300]
        assert ("The JSON has more than" in answer.json().get("error", "")) == (status == 413)
        # What may be read, and is large, is not read on the loop.
        assert any(one.name.startswith("parse") for one in threading.enumerate()) == (status != 413)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_a_body_is_counted_alike_in_all_pieces(size: int) -> None:
    text = json.dumps({"a\\": ['"x,y"', "\\", '\\"', 1, [2, {"b": None}]], "c": "\n,"}).encode()
    whole, pieces = JsonScan(), JsonScan()
    whole.feed(text)
    for start in range(0, len(text), size):
        pieces.feed(text[start : start + size])
    assert state(pieces) == state(whole)
    assert state(whole)["_values"] == 6 and state(whole)["_quotes"] == 14


def state(scan: JsonScan) -> dict[str, int]:
    return {name: getattr(scan, name) for name in JsonScan.__slots__}


@pytest.mark.parametrize("path", ["create", "install", "unzip", "commands/x/signal"])
async def test_a_route_takes_bodies_of_its_own_size(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as place:
        for size in (MAX_SMALL_BODY + 1, MAX_BODY):
            with place.dial() as connection:
                connection.send(head("POST", f"/sandbox/ann/{path}", f"Content-Length: {size}"))
                loop = asyncio.get_running_loop()
                answer = await asyncio.wait_for(loop.sock_recv(connection, 100), 60)
                assert answer.startswith(b"HTTP/1.1 413"), answer


async def test_a_key_whose_bodies_are_refused_waits(tmp_path: Path) -> None:
    async with served(tmp_path) as place:
        other = place.service.keys.make(["bob"])
        body = b"[" + b"0," * (MAX_BODY // 2 - 2) + b"0]"
        kind = {"Content-Type": "application/json"}
        async with place.client() as client, place.client(other) as neighbour:
            for _ in range(5):
                refused = await client.post("/sandbox/ann/execute", content=body, headers=kind)
                assert refused.status_code == 413
            wait = await client.get("/info")
            assert wait.status_code == 429 and 0 < int(wait.headers["retry-after"]) <= 60
            assert (await neighbour.get("/info")).status_code == 200


@pytest.mark.case("N05")
async def test_bodies_of_open_requests_have_a_budget(tmp_path: Path) -> None:
    async with served(tmp_path) as place:
        place.gate._bodies = Budget(1 << 20, 1 << 30)
        announced = head("POST", "/sandbox/ann/execute", f"Content-Length: {600 << 10}")
        begun = announced + b'{"code": "' + b"x" * (550 << 10)
        loop = asyncio.get_running_loop()
        with place.dial() as one, place.dial() as two:
            await loop.sock_sendall(one, begun)
            await loop.sock_sendall(two, begun)
            waiting = [asyncio.create_task(loop.sock_recv(each, 100)) for each in (one, two)]
            done, left = await asyncio.wait(waiting, return_when="FIRST_COMPLETED", timeout=60)
            assert [task.result()[:12] for task in done] == [b"HTTP/1.1 429"]
            for task in left:
                task.cancel()
        await until(lambda: place.gate._bodies.total == 0)


# Keys that end


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_what_a_key_has_open_ends_with_it(tmp_path: Path, how: str) -> None:
    """V7: WebSockets, streams, requests that wait; those of another key go on."""
    async with served(tmp_path) as place:
        keys = place.service.keys
        key = keys.make(["ann"], expires=time.time() + 3 if how == "expired" else None)
        other = keys.make(["ann"])
        long = {"command": "echo on; exec sleep 300"}
        async with place.client(key) as client, AsyncExitStack() as stack:
            sockets = []
            for one in (key, other):
                address = f"ws://127.0.0.1:{place.port}/sandbox/ann/ws"
                socket_ = await connect(address, additional_headers={"X-API-Key": one})
                stack.push_async_callback(socket_.close)
                await socket_.send(json.dumps(long))
                await socket_.recv()
                sockets.append(socket_)
            stream = asyncio.create_task(followed(client, long))
            waits = asyncio.create_task(client.post("/sandbox/ann/shell", json=long))
            running = place.service.executions.running
            await until(lambda: running("ann") == 4)
            if how == "revoked":
                keys.revoke(key.split("_")[1])
            with pytest.raises(ConnectionClosed):
                while True:
                    await sockets[0].recv()
            assert (await waits).status_code == 401
            assert await stream
            await until(lambda: running("ann") == 1)
            assert (await client.get("/info")).status_code == 401
            pong = await sockets[1].ping()
            await asyncio.wait_for(pong, 60)


async def followed(client: httpx2.AsyncClient, wish: dict[str, str]) -> bool:
    """Whether it was cut off in the middle."""
    try:
        async with client.stream("POST", "/sandbox/ann/stream", json=wish) as answer:
            async for _ in answer.aiter_bytes():
                pass
    except httpx2.HTTPError:
        return True
    return False


# What is HTTP


@pytest.mark.parametrize(
    "request_bytes",
    [
        head("POST", "/health", "Content-Length: 3", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        head("GET", "/health", "Content-Length: 3", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        head("GET", "/health").replace(b"\r\n", b"\n"),
        head("GET", "/health").replace(b"\r\n", b"\n", 1),
        head("GET", "/health", "X-A: b\n").replace(b"\n\r\n", b"\n", 1),
        head("GET", "/health", "X-A: b", " c"),
        head("GET", "/health", "X-A: b", "\tContent-Length: 3"),
        head("POST", "/sandbox/ann/execute", "Transfer-Encoding: chunked", "Content-Length: 5"),
    ],
)
async def test_what_a_proxy_may_read_otherwise_is_refused(
    tmp_path: Path, request_bytes: bytes
) -> None:
    """V12: 400, and the connection is closed before what follows is taken for a request."""
    async with served(tmp_path) as place:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(request_bytes + head("GET", "/info"))
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert answer.count(b"HTTP/1.1") == 1, answer


# Who leaves


async def test_clients_that_leave_are_not_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """V14: neither from a WebSocket, nor from a stream, nor while a program runs for them."""
    async with served(tmp_path) as place:
        long = {"command": "echo on; exec sleep 300"}
        running = place.service.executions.running
        address = f"ws://127.0.0.1:{place.port}/sandbox/ann/ws"
        for wish in ({}, long):
            async with connect(address, additional_headers={"X-API-Key": KEY}) as socket_:
                if wish:
                    await socket_.send(json.dumps(wish))
                    await socket_.recv()
                socket_.transport.abort()
        with pytest.raises(InvalidStatus):
            await connect(address, additional_headers={"X-API-Key": "wrong"})
        for path in ("shell", "stream"):
            await until(lambda: running("ann") == 0)
            with place.dial() as connection:
                body = json.dumps(long).encode()
                length = f"Content-Length: {len(body)}"
                kind = "Content-Type: application/json"
                connection.send(head("POST", f"/sandbox/ann/{path}", length, kind) + body)
                await until(lambda: running("ann") == 1)
        await until(lambda: running("ann") == 0)
        await until(lambda: place.connections == 0)
    found = [record.getMessage() for record in caplog.records if record.levelno > logging.WARNING]
    assert not found
