"""Count the turns that other tasks have on an event loop, and play a guest that leaves them
none."""

from __future__ import annotations

import asyncio

from paracle_sandbox.backends.base import Channel


class Turns:
    """A task that counts its turns until it is closed."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def close(self) -> None:
        self._task.cancel()


class Flood(Channel):
    """A guest that has sent all of it before it is read, so that a reader never has to wait.

    ``turns`` counts the turns of other tasks before each piece was read, and before the end was.
    ``read`` is set at the end.
    """

    def __init__(self, *pieces: bytes) -> None:
        self.turns: list[int] = []
        self.read = asyncio.Event()
        self._pieces = list(pieces)
        self._others = Turns()

    async def receive(self) -> bytes:
        self.turns.append(self._others.count)
        self._others.count = 0
        if self._pieces:
            return self._pieces.pop(0)
        self.read.set()
        return b""

    async def send(self, data: bytes) -> None:
        pass

    async def close(self) -> None:
        self._others.close()
