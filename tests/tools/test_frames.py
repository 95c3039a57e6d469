"""The answers of a session are separated from what its cells print."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from paracle_sandbox.sessions.cells import Cell
from paracle_sandbox.sessions.frames import FrameReader, compute_frame_limit
from paracle_sandbox.tools.browser import _from_cell

Result = TypeVar("Result")

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
                cell.handle_answer("stdout", piece)
            else:
                cell.add_output("stdout", piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cell.is_full and not cell.shown
    assert peak < 6 * len(data)


def deepest(is_accepted: Callable[[int], bool]) -> int:
    """The largest depth that is accepted, of those that are at all."""
    accepted, refused = 0, 100_000
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        accepted, refused = (middle, refused) if is_accepted(middle) else (accepted, middle)
    return accepted


def far_down(call: Callable[[], Result], frames: int = 60) -> Result:
    """Call a function from an application whose own calls have taken much of the stack."""
    return call() if frames == 0 else far_down(call, frames - 1)


@pytest.mark.parametrize("field", ["name", "value", "traceback", "number", "more"])
def test_what_nests_as_deep_as_is_let_pass_can_still_be_told(field: str) -> None:
    def ended(depth: int) -> dict[str, Any] | None:
        nested = "[" * depth + "]" * depth
        text = f'{{"type":"end","number":{nested},"error":{{"{field}":{nested}}}}}'
        pieces = list(FrameReader("mark").feed(framed(text.encode())))
        return next((piece for piece in pieces if isinstance(piece, dict)), None)

    depth = deepest(lambda depth: ended(depth) is not None)
    assert 1 < depth < 100
    found = Cell(MIB, ended=ended(depth))
    error = far_down(found.to_result)["error"]
    assert error == {"name": "Error", "message": "", "traceback": ""}
    assert far_down(lambda: json.dumps(found.ended))


def test_an_error_is_made_of_texts() -> None:
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    said = {"name": nested, "value": "went wrong", "traceback": 1.5}
    error = Cell(MIB, ended={"error": said}).to_result()["error"]
    assert error == {"name": "Error", "message": "went wrong", "traceback": ""}


def test_a_page_that_nests_as_deep_as_is_shown_can_still_be_told() -> None:
    def shown(depth: int) -> Cell:
        cell = Cell(MIB, ended={})
        nested = "[" * depth + "]" * depth
        text = f'{{"title":{nested},"url":"about:blank","elements":[{nested},"1 link",2]}}'
        cell.handle_answer("stdout", {"type": "display", "data": {"application/json": text}})
        return cell

    for depth in (1, 2, deepest(lambda depth: bool(shown(depth).shown))):
        told = far_down(lambda depth=depth: _from_cell(shown(depth).to_result()))
        assert "Traceback" not in told.text and "[[" not in told.text
        assert json.dumps(told.data)
    assert _from_cell(shown(1).to_result()).text == "(no title) - about:blank\n1 link\n2"


def test_long_texts_are_still_answers() -> None:
    text = '{"a": ["\\" \\\\", [1, 2]]}, "\u00e9" ' * 20_000
    payload = json.dumps({"type": "result", "data": {"text/plain": text}}).encode()
    assert len(payload) > MIB // 2
    (piece,) = FrameReader("mark").feed(framed(payload))
    assert piece == json.loads(payload)


def test_a_forged_answer_is_no_larger_than_what_may_be_shown() -> None:
    """Reading it as JSON would hold the event loop, whatever its size is then said to be."""
    data = framed(json.dumps({"type": "display", "data": {"text/html": "\n" * 4 * MIB}}).encode())
    pieces = list(FrameReader("mark", compute_frame_limit(MIB)).feed(data))
    assert b"".join(p for p in pieces if isinstance(p, bytes)) == data
    shown = framed(json.dumps({"type": "display", "data": {"text/html": "\n" * MIB}}).encode())
    (piece,) = FrameReader("mark", compute_frame_limit(MIB)).feed(shown)
    assert isinstance(piece, dict)


def test_a_document_of_very_many_values_is_not_looked_at() -> None:
    cell = Cell(max_output=8 * MIB)
    for document in ("[" + "[]," * MIB + "[]]", "[1, 2]"):
        cell.handle_answer("stdout", {"type": "display", "data": {"application/json": document}})
    assert cell.shown == [{"application/json": "[1, 2]"}]
