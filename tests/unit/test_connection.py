"""Tests of the connection. The test itself plays the guest, frame by frame."""

from __future__ import annotations

import asyncio
import errno
import json
import pickle
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from paracle_sandbox.backends.base import Channel
from paracle_sandbox.channel import frames
from paracle_sandbox.channel.connection import Connection
from paracle_sandbox.channel.socket import SocketChannel
from paracle_sandbox.errors import (
    ResourceLimitError,
    SandboxCreationError,
    SandboxExecutionError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxPathError,
)
from turns import Flood

HELLO = frames.encode_json(frames.HELLO, 0, {"protocol": 1, "python": "3.11.7", "pid": 1})


class Guest:
    """The other end of the channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = frames.FrameReader(frames.TO_GUEST)
        self._frames: list[tuple[int, int, bytes]] = []

    async def send(self, *data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, b"".join(data))

    async def take(self) -> tuple[int, int, bytes]:
        while not self._frames:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 20)
            if not data:
                raise EOFError
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    async def result(self, stream: int, value: dict[str, Any]) -> None:
        await self.send(frames.encode_json(frames.RESULT, stream, value))

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Connection, Guest]]:
    host, inside = socket.socketpair()
    connection, guest = Connection(SocketChannel(host), "box"), Guest(inside)
    await guest.send(HELLO)
    await connection.start()
    yield connection, guest
    await connection.close()
    guest.close()


Ends = tuple[Connection, Guest]


async def test_a_call_is_answered(ends: Ends) -> None:
    connection, guest = ends
    call = asyncio.create_task(connection.call({"op": "ping"}))
    kind, stream, payload = await guest.take()
    assert (kind, frames.decode_json(payload)) == (frames.OPEN, {"op": "ping"})
    await guest.result(stream, {"pong": 1})
    assert await call == {"pong": 1}


async def test_a_hello_that_nobody_waits_for_any_more_is_none_too_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller of `start` was cancelled before the guest answered.

    The guest did nothing wrong.
    """
    host, inside = socket.socketpair()
    connection, guest = Connection(SocketChannel(host), "box"), Guest(inside)
    starting = asyncio.create_task(connection.start())
    while not (begun := connection._hello):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert begun.cancelled()
    await guest.send(HELLO)
    call = asyncio.create_task(connection.call({"op": "ping"}))
    _, stream, _ = await guest.take()
    await guest.result(stream, {"pong": 1})
    assert await call == {"pong": 1}
    assert "protocol" not in caplog.text
    await guest.send(HELLO)
    with pytest.raises(SandboxExecutionError, match="second HELLO"):
        await connection.call({"op": "ping"})
    await connection.close()
    guest.close()


async def test_streams_do_not_mix(ends: Ends) -> None:
    connection, guest = ends
    first, second = connection.open({"op": "a"}), connection.open({"op": "b"})
    await guest.send(
        frames.encode(frames.DATA, second.number, b"2"),
        frames.encode(frames.DATA, first.number, b"1"),
        frames.encode(frames.STDERR, first.number, b"e"),
        frames.encode_json(frames.RESULT, first.number, {"n": 1}),
        frames.encode_json(frames.RESULT, second.number, {"n": 2}),
    )
    assert [item async for item in first] == [(frames.DATA, b"1"), (frames.STDERR, b"e")]
    assert [item async for item in second] == [(frames.DATA, b"2")]
    assert (first.result, second.result) == ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("not_found", SandboxFileNotFoundError, "not found"),
        ("path_escape", SandboxPathError, "leaves"),
        ("no_space", ResourceLimitError, "Disk limit exceeded"),
        ("permission", PermissionError, "denied"),
        ("exists", FileExistsError, "denied"),
        ("is_directory", IsADirectoryError, "denied"),
        ("not_directory", NotADirectoryError, "denied"),
        ("__class__", SandboxFileError, "denied"),
        (["not_found"], SandboxFileError, "denied"),
    ],
)
async def test_an_error_becomes_a_typed_one(
    ends: Ends, code: Any, kind: type[Exception], text: str
) -> None:
    connection, guest = ends
    call = asyncio.create_task(connection.call({"op": "stat", "path": "x"}))
    _, stream, _ = await guest.take()
    error = {"code": code, "message": "denied " + "!" * 10_000}
    await guest.send(frames.encode_json(frames.ERROR, stream, error))
    with pytest.raises(kind, match=text) as caught:
        await call
    assert len(str(caught.value)) < 1000
    if isinstance(caught.value, SandboxFileError):
        assert caught.value.filename == "x"
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.errno, again.filename) == (caught.value.errno, "x")


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ({"code": "permission", "errno": errno.EROFS}, errno.EROFS),
        ({"code": "permission", "errno": 10**4000}, errno.EACCES),
        ({"code": "is_directory", "errno": errno.ENOENT}, errno.EISDIR),
        ({"code": "too_large", "errno": errno.EFBIG}, errno.EFBIG),
        ({"code": "odd", "errno": "EFBIG"}, None),
    ],
)
async def test_an_error_has_the_number_of_its_kind(
    ends: Ends, said: dict[str, Any], number: int | None
) -> None:
    connection, guest = ends
    call = asyncio.create_task(connection.call({"op": "write", "path": "x"}))
    _, stream, _ = await guest.take()
    await guest.send(frames.encode_json(frames.ERROR, stream, {"message": "no", **said}))
    with pytest.raises(SandboxFileError) as caught:
        await call
    assert caught.value.errno == number


def test_values_are_counted_without_what_is_text() -> None:
    text = json.dumps({"path": '[{,"\\' * 100_000}).encode()
    assert not frames.has_more_items(text, 10)
    assert frames.has_more_items(json.dumps({"all": [[]] * 10}).encode(), 10)


def _raw(kind: int, stream: int, payload: bytes) -> bytes:
    return frames.HEADER.pack(kind, stream, len(payload)) + payload


VIOLATIONS: dict[str, Callable[[int], bytes]] = {
    "unknown stream": lambda n: _raw(frames.DATA, n + 7, b"x"),
    "the channel's own stream": lambda n: _raw(frames.RESULT, 0, b"{}"),
    "second hello": lambda n: HELLO,
    "hello on a stream": lambda n: _raw(frames.HELLO, n, b"{}"),
    "after the end": lambda n: _raw(frames.RESULT, n, b"{}") + _raw(frames.DATA, n, b"x"),
    "two ends": lambda n: _raw(frames.RESULT, n, b"{}") * 2,
    "frame of the host": lambda n: _raw(frames.OPEN, n, b"{}"),
    "unknown type": lambda n: _raw(200, n, b""),
    "huge": lambda n: frames.HEADER.pack(frames.DATA, n, 0xFFFFFFFF),
    "empty": lambda n: _raw(frames.DATA, n, b""),
    "no json": lambda n: _raw(frames.RESULT, n, b"\xff"),
    "no object": lambda n: _raw(frames.RESULT, n, b"[]"),
    "deep": lambda n: _raw(frames.RESULT, n, b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "many values": lambda n: _raw(frames.RESULT, n, b'{"a":[' + b"[]," * 5000 + b"0]}"),
    "a number of megabytes": lambda n: _raw(frames.RESULT, n, b'{"a":' + b"9" * 5000 + b"}"),
    "odd credit": lambda n: _raw(frames.CREDIT, n, b"123"),
    "no credit": lambda n: _raw(frames.CREDIT, n, b"\0\0\0\0"),
    "unowed credit": lambda n: _raw(frames.CREDIT, n, b"\0\0\0\1"),
    "event flood": lambda n: _raw(frames.EVENT, n, b"{}") * 20_000,
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_guest_that_breaks_the_protocol_is_cut_off(ends: Ends, name: str) -> None:
    connection, guest = ends
    victim, other = connection.open({"op": "a"}), connection.open({"op": "b"})
    await guest.send(VIOLATIONS[name](victim.number))
    with pytest.raises(SandboxExecutionError, match="the guest broke the protocol"):
        await other.finish()
    assert not connection.is_open
    with pytest.raises(SandboxExecutionError, match="the guest broke the protocol"):
        connection.open({"op": "c"})
    with pytest.raises((EOFError, ConnectionError)):
        while True:
            await guest.take()


async def test_a_broken_connection_leaves_others_alone(ends: Ends) -> None:
    connection, guest = ends
    host, inside = socket.socketpair()
    second, neighbour = Connection(SocketChannel(host), "other"), Guest(inside)
    await neighbour.send(HELLO)
    await second.start()
    await guest.send(_raw(200, 0, b""))
    call = asyncio.create_task(second.call({"op": "ping"}))
    _, stream, _ = await neighbour.take()
    await neighbour.result(stream, {})
    assert await call == {}
    await second.close()
    neighbour.close()


class Eager(Channel):
    """A channel that always has one more byte of a long frame, so that a reader never has to
    wait."""

    def __init__(self) -> None:
        frame = frames.encode(frames.DATA, 1, bytes(4000))
        self.left = [HELLO, *(frame[at : at + 1] for at in range(len(frame)))]

    async def receive(self) -> bytes:
        if not self.left:
            await asyncio.Event().wait()
        return self.left.pop(0)

    async def send(self, data: bytes) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_guest_that_floods_shares_the_loop() -> None:
    channel = Eager()
    connection = Connection(channel, "box")
    starting = asyncio.create_task(connection.start())
    await asyncio.sleep(0)
    connection.open({"op": "read"})
    turns = 0
    while channel.left:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    await starting
    await connection.close()


async def test_a_flood_of_tiny_frames_shares_the_loop() -> None:
    """V3: one piece of data from the guest may hold twenty thousand frames."""
    tiny = frames.encode(frames.DATA, 1, b"x")
    many = frames.CHUNK // len(tiny)
    flood = Flood(HELLO, tiny * many, tiny * many, tiny * many)
    connection = Connection(flood, "box")
    starting = asyncio.create_task(connection.start())
    await asyncio.sleep(0)
    stream = connection.open({"op": "read"})
    await flood.read.wait()
    assert min(flood.turns[2:]) >= many // 2048
    assert len((await anext(stream))[1]) == 3 * many
    await starting
    await connection.close()


async def test_more_than_the_credit_is_refused(ends: Ends) -> None:
    connection, guest = ends
    stream = connection.open({"op": "read"})
    chunk = frames.encode(frames.DATA, stream.number, bytes(frames.CHUNK))
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            await guest.send(chunk)
    with pytest.raises(SandboxExecutionError, match="credit"):
        await stream.finish()


async def test_what_comes_after_another_operation_may_not_come_before(ends: Ends) -> None:
    connection, guest = ends
    for is_early in (False, True):
        first = connection.open({"op": "a"})
        second = connection.open({"op": "b"}, after=first)
        await guest.take()
        assert frames.decode_json((await guest.take())[2]) == {"op": "b", "after": first.number}
        answers = [
            frames.encode_json(frames.RESULT, first.number, {}),
            frames.encode(frames.DATA, second.number, b"2"),
        ]
        await guest.send(*(reversed(answers) if is_early else answers))
        if not is_early:
            assert await anext(second) == (frames.DATA, b"2")
            continue
        with pytest.raises(SandboxExecutionError, match="before its turn"):
            await second.finish()


async def test_a_slow_consumer_stalls_only_its_own_stream(ends: Ends) -> None:
    connection, guest = ends
    slow, quick = connection.open({"op": "slow"}), connection.open({"op": "quick"})
    filled = frames.encode(frames.DATA, slow.number, bytes(frames.CHUNK))
    for _ in range(frames.WINDOW // frames.CHUNK):
        await guest.send(filled)
    await guest.result(quick.number, {"ok": True})
    assert await quick.finish() == {"ok": True}


async def test_credit_comes_back_as_data_is_consumed(ends: Ends) -> None:
    connection, guest = ends
    stream = connection.open({"op": "read"})
    assert (await guest.take())[0] == frames.OPEN
    total = 3 * frames.WINDOW

    async def produce() -> None:
        room, sent = frames.WINDOW, 0
        while sent < total:
            if room < frames.CHUNK:
                kind, number, payload = await guest.take()
                assert (kind, number) == (frames.CREDIT, stream.number)
                room += frames.decode_credit(payload)
                continue
            await guest.send(frames.encode(frames.DATA, stream.number, b"x" * frames.CHUNK))
            sent += frames.CHUNK
            room -= frames.CHUNK
        await guest.result(stream.number, {})

    producer = asyncio.create_task(produce())
    assert sum([len(payload) async for _, payload in stream]) == total
    await producer


async def test_a_flood_of_tiny_frames_is_merged(ends: Ends) -> None:
    connection, guest = ends
    stream = connection.open({"op": "exec"})
    pair = _raw(frames.DATA, stream.number, b"o") + _raw(frames.STDERR, stream.number, b"e")
    await guest.send(pair * 50_000)
    await guest.result(stream.number, {})
    while not stream.ended:
        await asyncio.sleep(0)
    items = [item async for item in stream]
    assert len(items) < 3000
    for kind, byte in ((frames.DATA, b"o"), (frames.STDERR, b"e")):
        assert b"".join(data for k, data in items if k == kind) == byte * 50_000


async def test_writing_waits_for_the_guests_credit(ends: Ends) -> None:
    connection, guest = ends
    stream = connection.open({"op": "write"})
    writing = asyncio.create_task(stream.write(bytes(2 * frames.WINDOW)))
    await guest.take()
    received = 0
    while received < frames.WINDOW:
        received += len((await guest.take())[2])
    assert received == frames.WINDOW and not writing.done()
    await guest.send(frames.encode_credit(stream.number, frames.WINDOW))
    while received < 2 * frames.WINDOW:
        received += len((await guest.take())[2])
    assert await writing is True


async def test_writing_ends_when_the_guest_has_had_enough(ends: Ends) -> None:
    connection, guest = ends
    stream = connection.open({"op": "write", "path": "big"})
    writing = asyncio.create_task(stream.write(bytes(2 * frames.WINDOW)))
    _, number, _ = await guest.take()
    await guest.send(frames.encode_json(frames.ERROR, number, {"code": "no_space", "message": ""}))
    drain = asyncio.create_task(_take_all(guest))
    assert await writing is False
    with pytest.raises(ResourceLimitError):
        await stream.finish()
    drain.cancel()


async def _take_all(guest: Guest) -> None:
    while True:
        await guest.take()


async def test_leaving_early_cancels_and_the_rest_is_dropped(ends: Ends) -> None:
    connection, guest = ends
    with connection.open({"op": "read"}) as stream:
        pass
    await guest.take()
    kind, _, payload = await guest.take()
    assert (kind, frames.decode_json(payload)) == (frames.SIGNAL, {"kill": True})
    late = frames.encode(frames.DATA, stream.number, bytes(frames.CHUNK))
    await guest.send(late, frames.encode_json(frames.RESULT, stream.number, {}))
    call = asyncio.create_task(connection.call({"op": "ping"}))
    _, number, _ = await guest.take()
    await guest.result(number, {})
    assert await call == {}


async def test_the_end_of_the_guest_ends_every_stream(ends: Ends) -> None:
    connection, guest = ends
    streams = [connection.open({"op": "a"}) for _ in range(3)]
    guest.close()
    for stream in streams:
        with pytest.raises(SandboxExecutionError, match="died"):
            await stream.finish()
    assert not connection.is_open


async def test_close_is_idempotent_and_says_why(ends: Ends) -> None:
    connection, _ = ends
    stream = connection.open({"op": "a"})
    await connection.close("The sandbox was stopped")
    await connection.close()
    with pytest.raises(SandboxExecutionError, match="was stopped"):
        await stream.finish()


async def test_a_guest_does_not_hear_of_the_end_before_the_channel_is_closed(ends: Ends) -> None:
    connection, guest = ends
    stream = connection.open({"op": "a"})
    await guest.take()
    connection.lose()
    with pytest.raises(SandboxExecutionError, match="was stopped"):
        await stream.finish()
    with pytest.raises(SandboxExecutionError, match="was stopped"):
        connection.open({"op": "b"})
    await guest.result(stream.number, {})  # its result does not matter any more
    with pytest.raises(BlockingIOError):
        guest._sock.recv(1)
    await connection.close("another reason")
    with pytest.raises((EOFError, ConnectionResetError)):
        await guest.take()
    with pytest.raises(SandboxExecutionError, match="was stopped"):
        connection.open({"op": "b"})


async def test_what_is_asked_for_at_once_travels_together(ends: Ends) -> None:
    connection, guest = ends
    for name in "abc":
        connection.open({"op": name})
    await asyncio.sleep(0)
    together = guest._sock.recv(1 << 16)
    asked = [frames.decode_json(payload) for _, _, payload in guest._reader.feed(together)]
    assert asked == [{"op": "a"}, {"op": "b"}, {"op": "c"}]


async def test_what_the_channel_does_not_take_at_once_comes_in_order(ends: Ends) -> None:
    """Send much more than a socket holds, in frames of all sizes."""
    connection, guest = ends
    sizes = [(7 * number) % 190_000 + 1 for number in range(0, 27_000, 900)]
    for size in sizes:
        connection.open({"op": "x" * size})
    waiting = asyncio.create_task(connection.wait_until_drained())
    await asyncio.sleep(0)
    assert not waiting.done()
    for number, size in enumerate(sizes, 1):
        _, stream, payload = await guest.take()
        assert (stream, len(frames.decode_json(payload)["op"])) == (number, size)
    await waiting


async def test_a_request_that_fits_no_frame(ends: Ends) -> None:
    connection, _ = ends
    with pytest.raises(ValueError, match="too large"):
        connection.open({"op": "exec", "argv": ["x" * frames.MAX_REQUEST]})


async def test_a_large_request_arrives_as_one(ends: Ends) -> None:
    connection, guest = ends
    request = {"op": "exec", "argv": ["\u4e2d\udcff" * 400_000, 'a"b\n'], "env": {"A": "x" * 10**6}}
    stream = connection.open(request)
    connection.open({"op": "ping"})
    kind, number, payload = await guest.take()
    assert (kind, number) == (frames.OPEN, stream.number)
    assert frames.decode_json(payload, frames.MAX_REQUEST_ITEMS) == request
    assert len(payload) > frames.MAX_PAYLOAD
    assert (await guest.take())[0] == frames.OPEN


@pytest.mark.parametrize(
    "sent",
    [
        _raw(frames.PART, 1, b"x" * frames.MAX_PAYLOAD) + _raw(frames.DATA, 1, b"x"),
        _raw(frames.PART, 1, b"x" * frames.MAX_PAYLOAD) + _raw(frames.OPEN, 2, b"}"),
        _raw(frames.PART, 1, b"{"),
        _raw(frames.PART, 1, b""),
        _raw(frames.PART, 1, b"x" * frames.MAX_PAYLOAD) * 9,
    ],
)
def test_parts_that_make_no_request(sent: bytes) -> None:
    with pytest.raises(frames.ProtocolError):
        list(frames.FrameReader(frames.TO_GUEST).feed(sent))
    with pytest.raises(frames.ProtocolError):
        list(frames.FrameReader(frames.TO_HOST).feed(sent))


@pytest.mark.parametrize(
    "first",
    [
        b"",
        _raw(frames.HELLO, 0, b"{}"),
        _raw(frames.HELLO, 0, b'{"protocol":99}'),
        b"GET / HTTP/1.1\r\n",
    ],
)
async def test_a_guest_that_does_not_greet_is_no_guest(first: bytes) -> None:
    host, inside = socket.socketpair()
    connection = Connection(SocketChannel(host), "box")
    inside.sendall(first)
    with pytest.raises(SandboxCreationError, match="guest did not"):
        await connection.start(timeout_seconds=0.1)
    inside.close()
