"""How full the tmpfs mounts of a container are, where its files are not on this machine.

Only somebody inside can tell. That is a small program beside the guest, started when somebody asks
for the first time, which answers each line with a line. It has a user of its own, so that programs
of the sandbox can neither stop it nor speak for it, and it ends with its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...errors import SandboxError
from ..machine.workspaces import is_nearly_full
from .attach_channel import AttachChannel
from .engine import Engine

_NOBODY = "65534:65534"
_ANSWER_SECONDS = 10.0
_MAX_ANSWER = 4096
_PROGRAM = """
import os, sys
while os.read(0, 1):
    answer = ""
    for place in sys.argv[1:]:
        found = os.statvfs(place)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        no_more = found.f_files > 0 and not found.f_ffree  # gVisor does not count files
        answer += "%d %d %d " % (used, found.f_blocks * found.f_frsize, no_more)
    os.write(1, answer.strip().encode() + b"\\n")
"""


class Space:
    """Of one container. ``places`` are its tmpfs mounts, each with a limit of its own."""

    def __init__(self, engine: Engine, container: str, places: Sequence[str]) -> None:
        self._engine = engine
        self._container = container
        self._places = places
        self._channel: AttachChannel | None = None
        self._turn = asyncio.Lock()

    async def look(self) -> tuple[int, bool] | None:
        """Bytes used in all, and whether one of them is full; None when nobody can say."""
        async with self._turn:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    return _read(await self._ask(), len(self._places))
            except (SandboxError, OSError, ValueError):  # a timeout is an OSError
                await self.close()
                return None
            except BaseException:  # its answer would be the next one's
                await self.close()
                raise

    async def _ask(self) -> bytes:
        if self._channel is None:
            self._channel = await self._engine.execute(
                self._container,
                {
                    "AttachStdin": True,
                    "AttachStdout": True,
                    "AttachStderr": True,
                    "Tty": False,
                    "User": _NOBODY,
                    "WorkingDir": "/",
                    "Cmd": ["python3", "-I", "-S", "-c", _PROGRAM, *self._places],
                },
            )
        await self._channel.send(b"?")
        answer = b""
        while not answer.endswith(b"\n"):
            piece = await self._channel.receive()
            if not piece or len(answer) > _MAX_ANSWER:
                raise ConnectionError("it has ended")
            answer += piece
        return answer

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _read(answer: bytes, places: int) -> tuple[int, bool]:
    numbers = [int(word) for word in answer.split()]
    if len(numbers) != 3 * places:
        raise ValueError("not an answer")
    found = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    full = any(is_nearly_full(used, limit) or no_more for used, limit, no_more in found)
    return sum(numbers[::3]), full
