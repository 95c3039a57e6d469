"""What the relay puts between a guest and its client: refusals where frames end, within bounds.
The user may run one program at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from service_place import Place

from paracle_sandbox.backends.base import Channel
from paracle_sandbox.channel.frames import (
    DATA,
    ERROR,
    HEADER,
    MAX_PAYLOAD,
    OPEN,
    TO_HOST,
    FrameReader,
    encode,
    encode_json,
)
from paracle_sandbox.channel.resumable import (
    END_MESSAGE,
    HIGH_WATER,
    MAX_MESSAGE,
    OutOfStep,
    acknowledgement,
    data_message,
)
from paracle_sandbox.service.remote.relay import Relay

REQUEST = {"op": "exec", "argv": ["x"]}
LARGE = encode(DATA, 1, b"y" * MAX_PAYLOAD)
MORE_THAN_ROOM = LARGE * (HIGH_WATER // MAX_PAYLOAD + 2)


class Guest(Channel):
    """It says what the test has it say."""

    def __init__(self) -> None:
        self._words: asyncio.Queue[bytes] = asyncio.Queue()
        self._taken = False

    async def say(self, words: bytes) -> None:
        """Returns once the relay has taken it in, and asks for more."""
        self._words.put_nowait(words)
        async with asyncio.timeout(30):
            await self._words.join()

    def begin(self, words: bytes) -> None:
        """It may be more than there is room for."""
        self._words.put_nowait(words)

    async def receive(self) -> bytes:
        if self._taken:
            self._words.task_done()
        self._taken = False
        words = await self._words.get()
        self._taken = True
        return words

    async def send(self, data: bytes) -> None:
        pass

    async def close(self) -> None:
        pass


class Client:
    """Of a relay of its own."""

    def __init__(self, place: Place) -> None:
        parts = place.service
        self.guest = Guest()
        self.relay = Relay(
            self.guest, "bob", "box", parts.executions, parts.journal, parts.metrics, lambda: None
        )
        self.relay.start()
        self.told: list[bytes] = []

    async def come(self) -> None:
        self._holder = await self.relay.attach(self._hear, 0)

    async def _hear(self, message: bytes) -> None:
        self.told.append(message)

    async def ask(self, *streams: int) -> None:
        requests = b"".join(encode_json(OPEN, stream, REQUEST) for stream in streams)
        await self.relay.take(data_message(requests), self._holder)

    async def acknowledge(self) -> None:
        await self.relay.take(acknowledgement(len(self.received)), self._holder)

    async def until(self, size: int) -> None:
        """So many bytes are there."""
        async with asyncio.timeout(30):
            while len(self.received) < size:
                await asyncio.sleep(0)

    @property
    def received(self) -> bytes:
        return b"".join(message[1:] for message in self.told if message[:1] == b"d")

    @property
    def heard(self) -> list[tuple[int, int, int]]:
        """The frames: kind, stream, size."""
        frames = FrameReader(TO_HOST)
        heard = [(kind, stream, len(data)) for kind, stream, data in frames.feed(self.received)]
        assert frames.unfinished == 0
        return heard


@pytest_asyncio.fixture
async def bob(tmp_path: Path) -> AsyncIterator[Client]:
    place = Place(tmp_path, user_concurrent=1)
    await place.service.start()
    bob = Client(place)
    await bob.come()
    yield bob
    await bob.relay.close()
    await place.close()


@pytest.mark.parametrize("cut", [1, 9, 500])
async def test_a_refusal_falls_into_no_frame_of_the_guest(bob: Client, cut: int) -> None:
    """Nor does it wait for a guest that stops in the middle of one."""
    frame = encode(DATA, 1, b"y" * 1000)
    await bob.guest.say(frame + frame[:cut])
    await bob.ask(1, 3)
    assert [one[:2] for one in bob.heard] == [(DATA, 1), (ERROR, 3)]
    await bob.guest.say(frame[cut:])
    assert [one[:2] for one in bob.heard] == [(DATA, 1), (ERROR, 3), (DATA, 1)]


async def test_a_refusal_waits_for_the_end_of_a_frame_that_is_under_way(bob: Client) -> None:
    """A slow client has a part of it."""
    bob.guest.begin(MORE_THAN_ROOM)
    await bob.until(HIGH_WATER)
    await bob.ask(1, 3)
    assert len(bob.received) == HIGH_WATER
    await bob.acknowledge()
    await bob.until(len(MORE_THAN_ROOM) + 1)
    kinds = [kind for kind, _, _ in bob.heard]
    assert kinds == [DATA] * (len(MORE_THAN_ROOM) // len(LARGE)) + [ERROR]


async def test_a_refusal_that_waited_for_room_is_said_though_the_guest_is_silent(
    bob: Client,
) -> None:
    words = encode(DATA, 1, LARGE[: MAX_PAYLOAD - HEADER.size]) * (HIGH_WATER // MAX_PAYLOAD)
    await bob.guest.say(words)
    await bob.ask(1, 3)
    assert bob.received == words
    await bob.acknowledge()
    assert bob.heard[-1][:2] == (ERROR, 3)


async def test_a_guest_without_frames_leaves_a_refusal_no_place(bob: Client) -> None:
    """The relay ends, and the client has what the guest said and nothing else."""
    frame = encode(DATA, 1, b"y")
    for words in (frame + b"y" * 20, b"more"):
        await bob.guest.say(words)
    with pytest.raises(OutOfStep, match="no end"):
        await bob.ask(1, 3)
    assert bob.received == frame + b"y" * 20 + b"more"
    assert bob.told[-1] == END_MESSAGE


async def test_what_a_client_has_refused_and_does_not_read_is_bounded(bob: Client) -> None:
    bob.guest.begin(MORE_THAN_ROOM)
    await bob.until(HIGH_WATER)
    with pytest.raises(OutOfStep, match="more requests over the quota"):
        for start in range(1, 40_000, 4000):
            await bob.ask(*range(start, start + 4000))
    assert len(bob.received) <= HIGH_WATER + MAX_MESSAGE
    assert bob.told[-1] == END_MESSAGE
    bob.told.clear()
    await bob.come()
    assert bob.told[-1] == END_MESSAGE, "it would come back for ever"
    await bob.ask(1, 3)
    assert bob.told[-1] == END_MESSAGE
