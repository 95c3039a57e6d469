"""What a session says, told apart from what its cells print."""

from __future__ import annotations

from paracle_sandbox.sessions.frames import FrameReader


def test_frames_survive_any_cut_and_forgery() -> None:
    frame = b'\x1emark15\n{"type": "end"}'
    data = b"before\x1emar" + frame + b"\x1emarkx\x1emark99999999999\x1emark3\n{[}" + frame + b"x"
    for size in range(1, len(data) + 1):
        reader = FrameReader("mark")
        pieces = [p for i in range(0, len(data), size) for p in reader.feed(data[i : i + size])]
        assert [p for p in pieces if isinstance(p, dict)] == [{"type": "end"}] * 2
        printed = b"".join(p for p in pieces if isinstance(p, bytes))
        assert printed == data.replace(frame, b"")
