"""Tests of how control messages are encoded, how much data is read at once, and of timers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paracle_sandbox.channel import frames
from paracle_sandbox.guest.loop import Loop
from paracle_sandbox.guest.wire import SMALL_READ_BYTES, Channel, Wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Closed at once: others count descriptors."""
    loop = Loop()
    yield loop
    loop._epoll.close()


@given(VALUES)
def test_it_is_what_json_makes_of_it(value: Any) -> None:
    assert frames.to_json(value) == json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("accelerated", [True, False])
def test_it_is_the_same_without_the_library_in_c(
    monkeypatch: pytest.MonkeyPatch, accelerated: bool
) -> None:
    if not accelerated:
        monkeypatch.setattr(frames, "c_make_encoder", None)
    encode = frames._make_encoder()
    assert encode({"a": [1, None, 0.5], "\udc80": "é"}) == '{"a":[1,null,0.5],"\\udc80":"\\u00e9"}'
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode({"a": object()})


def test_more_than_a_frame_holds_is_refused(loop: Loop) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(Channel(loop, theirs.fileno(), theirs.fileno()), 1, lambda stream: None)
        with pytest.raises(frames.ProtocolError, match="too large"):
            wire.result({"a": "x" * frames.MAX_PAYLOAD})


def test_much_is_read_at_once_where_much_comes(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: asked.append(size) or real(fd, size))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(loop, theirs.fileno(), theirs.fileno())
        large = frames.encode(frames.DATA, 1, bytes(2 * SMALL_READ_BYTES))
        for sent in (frames.encode(frames.END, 1), large, frames.encode(frames.END, 1)):
            ours.sendall(sent)
            while not list(channel.receive()):
                pass
    assert asked == [SMALL_READ_BYTES, SMALL_READ_BYTES, frames.CHUNK, frames.CHUNK]


def test_timers_run_in_the_order_of_their_times(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen: list[str] = []
    for seconds, name in ((2.0, "c"), (0.0, "a"), (1.0, "b"), (0.0, "a2"), (60.0, "never")):
        loop.call_later(seconds, lambda name=name: seen.append(name))
    for later in (["a", "a2"], ["a", "a2", "b"], ["a", "a2", "b", "c"]):
        loop.run_once(block=False)
        assert seen == later
        now[0] += 1
