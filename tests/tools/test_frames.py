"""What a session says, told apart from what its cells print."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from paracle_sandbox.sessions.cells import Cell
from paracle_sandbox.sessions.frames import FrameReader

MIB = 1 << 20


def test_frames_survive_any_cut_and_forgery() -> None:
    frame = b'\x1emark15\n{"type": "end"}'
    data = b"before\x1emar" + frame + b"\x1emarkx\x1emark99999999999\x1emark3\n{[}" + frame + b"x"
    for size in range(1, len(data) + 1):
        reader = FrameReader("mark")
        pieces = [p for i in range(0, len(data), size) for p in reader.feed(data[i : i + size])]
        assert [p for p in pieces if isinstance(p, dict)] == [{"type": "end"}] * 2
        printed = b"".join(p for p in pieces if isinstance(p, bytes))
        assert printed == data.replace(frame, b"")


def framed(payload: bytes) -> bytes:
    return b"\x1emark%d\n" % len(payload) + payload


def test_a_large_answer_in_small_pieces_costs_what_its_pieces_do() -> None:
    """A cell that sends one byte after the other must not keep the host busy: to copy all that has
    come each time takes half a minute here."""
    reader = FrameReader("mark")
    payload = json.dumps({"type": "display", "data": {"text/plain": "x" * (24 * MIB)}}).encode()
    data = framed(payload)
    assert list(reader.feed(data[:-3000])) == []
    before = time.process_time()
    pieces = [p for i in range(len(data) - 3000, len(data)) for p in reader.feed(data[i : i + 1])]
    assert time.process_time() - before < 3
    assert pieces == [json.loads(payload)]


LARGE = {
    "lists": b'{"type":"display","data":[' + b"[]," * MIB + b"[]]}",
    "objects": b'{"type":"display","data":[' + b"{}," * MIB + b"{}]}",
    "texts": b'{"type":"display","data":[' + b'"ab",' * MIB + b'""]}',
    "a document": json.dumps(
        {"type": "display", "data": {"application/json": "[" + "[]," * MIB + "[]]"}}
    ).encode(),
}


@pytest.mark.parametrize("name", LARGE)
def test_an_answer_takes_no_more_memory_than_its_size_says(name: str) -> None:
    """Whatever it is made of. Read as JSON, each of these would take thirty times its size."""
    data, cell = framed(LARGE[name]), Cell(max_output=MIB)
    tracemalloc.start()
    try:
        for piece in FrameReader("mark").feed(data):
            if isinstance(piece, dict):
                cell.take("stdout", piece)
            else:
                cell.add("stdout", piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cell.is_full and not cell.shown
    assert peak < 6 * len(data)


def test_long_texts_are_still_answers() -> None:
    text = '{"a": ["\\" \\\\", [1, 2]]}, "\u00e9" ' * 20_000
    payload = json.dumps({"type": "result", "data": {"text/plain": text}}).encode()
    assert len(payload) > MIB // 2
    (piece,) = FrameReader("mark").feed(framed(payload))
    assert piece == json.loads(payload)
