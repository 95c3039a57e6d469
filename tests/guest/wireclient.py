"""A small synchronous host for tests. It starts a real guest as a subprocess over a socketpair."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paracle_sandbox
from paracle_sandbox.channel import frames

SERVE = "import sys, json; from paracle_sandbox.guest.main import serve; "
SERVE += "serve(int(sys.argv[1]), json.loads(sys.argv[2]))"
BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


class Answer:
    """All frames that came back on one stream."""

    def __init__(self) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.events: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    @property
    def pid(self) -> int | None:
        """The last pid that was reported.

        If a preforked process died before it read its program, another process ran it.
        """
        return next((event["pid"] for event in reversed(self.events) if "pid" in event), None)


class GuestClient:
    """Start a guest: `with GuestClient(folder) as guest:`.

    Every wait has a deadline. ``wrap`` is a command that starts the guest.
    """

    def __init__(
        self,
        working_dir: Any,
        python: str = sys.executable,
        wrap: Sequence[str] = (),
        **setup: object,
    ) -> None:
        self._setup = {"working_dir": str(working_dir), "env": BASE_ENV, "python": python, **setup}
        self._wrap = wrap
        self._python = python
        self._streams: dict[int, Answer] = {}
        self._next = 1
        self.granting = True

    def __enter__(self) -> GuestClient:
        self.socket, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [*self._wrap, self._python, "-c", SERVE, str(theirs.fileno()), json.dumps(self._setup)],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": str(Path(paracle_sandbox.__file__).parents[1])},
        )
        theirs.close()
        self._reader = frames.FrameReader(frames.TO_HOST)
        self._streams[0] = Answer()
        self.wait_until(lambda: bool(self._streams[0].events))
        self.hello = self._streams[0].events[0]
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()

    def open(self, op: str, **request: Any) -> int:
        stream, self._next = self._next, self._next + 1
        self._streams[stream] = Answer()
        self.send(frames.encode_json(frames.OPEN, stream, {"op": op, **request}))
        return stream

    def exec(self, *argv: str, **request: Any) -> int:
        return self.open("exec", argv=list(argv), **request)

    def run(self, *argv: str, **request: Any) -> Answer:
        return self.wait(self.exec(*argv, **request))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def data(self, stream: int, data: bytes) -> None:
        self.send(frames.encode(frames.DATA, stream, data))

    def end(self, stream: int) -> None:
        self.send(frames.encode(frames.END, stream))

    def signal(self, stream: int, **request: Any) -> None:
        self.send(frames.encode_json(frames.SIGNAL, stream, request))

    def grant(self, stream: int, amount: int) -> None:
        self.send(frames.encode_credit(stream, amount))

    def answer(self, stream: int) -> Answer:
        return self._streams[stream]

    def wait(self, stream: int, seconds: float = 20) -> Answer:
        answer = self._streams[stream]
        self.wait_until(lambda: answer.ended, seconds)
        return answer

    def wait_until(self, condition: Any, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, "the guest did not answer in time"
            self.poll(min(left, 0.05))

    def poll(self, seconds: float) -> None:
        """Process the frames that arrive within this time."""
        if select.select([self.socket], [], [], seconds)[0]:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError("the guest closed the channel")
            for kind, stream, payload in self._reader.feed(data):
                self._take(kind, stream, payload)

    def _take(self, kind: int, stream: int, payload: bytes) -> None:
        answer = self._streams[stream]
        assert not answer.ended, "a frame after the end of the stream"
        if kind == frames.DATA:
            answer.stdout += payload
        elif kind == frames.STDERR:
            answer.stderr += payload
        elif kind in (frames.EVENT, frames.HELLO):
            answer.events.append(frames.decode_json(payload))
        elif kind == frames.RESULT:
            answer.result = frames.decode_json(payload)
        elif kind == frames.ERROR:
            answer.error = frames.decode_json(payload)
        if kind in frames.CREDITED and self.granting:
            self.grant(stream, len(payload))
