"""Tests of the output of a program, as bytes and as text, small and large."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import copy
import gc
import pickle
import random
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from paracle_sandbox.errors import (
    ResourceLimitError,
    SandboxExecutionError,
    SandboxTimeoutError,
    StoppedError,
)
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.output import Printed
from paracle_sandbox.testing.fake import FakeBackend

MIB = 1 << 20
# Of each length, so that they are cut at any place; newlines of every kind.
TEXT = "a\r\n\u00e4\u20ac\U0001f600\r\n\x00".encode()
LARGE = TEXT * (3 * MIB // len(TEXT))


def printed(data: bytes, piece: int, *, only_text: bool = False) -> Printed:
    made = Printed()
    made.only_text = only_text
    for start in range(0, len(data), piece):
        made.add(data[start : start + piece])
    return made


@pytest.mark.parametrize("data", [b"", TEXT, LARGE, random.Random(1).randbytes(3 * MIB)])
@pytest.mark.parametrize("piece", [997, 65_536, 2 * MIB - 1])
@pytest.mark.parametrize("only_text", [False, True])
def test_bytes_and_text_are_exact_however_they_came(data: bytes, piece: int, only_text: bool):
    made = printed(data, piece, only_text=only_text)
    assert bool(made) == bool(data)
    assert made.raw() == data
    assert made.text() == data.decode("utf-8", "replace")
    assert made.text() == data.decode("utf-8", "replace")


def test_bytes_stay_beside_their_text_for_who_may_ask_for_them():
    made = printed(LARGE, 65_536)
    assert made.text() == LARGE.decode()
    assert made.raw() == LARGE


def test_text_takes_the_place_of_bytes_that_nobody_asks_for():
    size = 32 * MIB
    made = printed(b"y\n" * (size // 2), 65_536, only_text=True)
    assert len(made.raw()) == size  # which are no part of what is counted below
    tracemalloc.start()
    text = made.text()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text == "y\n" * (size // 2)
    assert peak < 1.5 * size  # the text, with room to grow that is not used
    assert made.raw() == b""
    assert made.text() is text


def test_readers_in_many_threads_get_the_same_text():
    made = printed(LARGE, 65_536, only_text=True)
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: made.text(), range(8)))
    assert all(text == LARGE.decode() for text in texts)


@pytest.mark.parametrize("after", [1, 7, 20, 30])
def test_who_was_interrupted_can_read_it_again(monkeypatch: pytest.MonkeyPatch, after: int):
    made = printed(LARGE, 65_536, only_text=True)
    calls = 0
    original = codecs.getincrementaldecoder("utf-8")

    class Interrupted(original):  # type: ignore[misc, valid-type]
        def decode(self, data: bytes, final: bool = False) -> str:
            nonlocal calls
            calls += 1
            if calls == after:
                raise KeyboardInterrupt
            return super().decode(data, final)

    monkeypatch.setattr(codecs, "getincrementaldecoder", lambda _: Interrupted)
    try:
        made.text()
    except KeyboardInterrupt:
        pass
    assert calls == after
    assert made.text() == LARGE.decode()


def test_bytes_are_read_whole_while_more_come():
    made = Printed()
    chunk = bytes(range(256)) * 1024
    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(lambda: [made.add(chunk) for _ in range(64)])
        while not adding.done():
            data = made.raw()
            assert len(data) % len(chunk) == 0 and len(data) <= 64 * len(chunk)
            assert data == chunk * (len(data) // len(chunk))
    assert made.raw() == chunk * 64


@pytest.mark.parametrize(
    "kind", [StoppedError, SandboxExecutionError, ResourceLimitError, SandboxTimeoutError]
)
@pytest.mark.parametrize("data", [TEXT, LARGE])
def test_errors_can_be_sent_to_another_process_with_what_was_printed(kind, data):
    error = kind(
        "stopped", "box", stdout=printed(data, 65_536), stderr=printed(b"\xff", 1, only_text=True)
    )
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is kind and str(twin) == "stopped" and twin.sandbox_id == "box"
        assert (twin.stdout, twin.stderr) == (data.decode(), "\ufffd")
    assert (error.stdout, error.stderr) == (data.decode(), "\ufffd")


def test_what_an_error_carries_can_be_replaced():
    error = StoppedError("stopped", stdout=printed(TEXT, 1), stderr="why")
    error.stdout, error.stderr = "other", "reason"
    assert (error.stdout, error.stderr) == ("other", "reason")


async def test_output_is_let_go_of_with_its_error() -> None:
    """No garbage collection is needed: fifty floods would be a hundred megabytes by the time it
    runs."""
    gc.disable()
    try:
        backend = FakeBackend()
        async with SandboxManager(1, backend=backend) as manager:
            sandbox = await manager.create({"max_output_mb": 1})
            command = await sandbox.start_command("yes", timeout=60)
            gone = weakref.ref(command)
            for _ in range(2):
                with contextlib.suppress(ResourceLimitError):
                    await command.wait()
            with contextlib.suppress(ResourceLimitError):
                await sandbox.execute("yes", timeout=60)
            del command
            await asyncio.sleep(0)
            assert gone() is None
    finally:
        gc.enable()
