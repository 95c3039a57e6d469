"""Large files of a sandbox, piece by piece: for callers that pass them on."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from ..channel.frames import DATA
from ..channel.stream import Stream
from ..errors import SandboxFileError
from .files import SandboxFiles
from .paths import AnyPath


class SandboxTransfers(SandboxFiles):
    """Memory stays flat: a slow reader or writer stalls the other side."""

    async def read_stream(
        self, path: AnyPath, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """The content from ``offset`` on, ``length`` bytes at most."""
        request = self._asking("read", path, offset=offset)
        if length is not None:
            request["length"] = length
        connection = self._live()
        self._touch(+1)
        try:
            with connection.open(request) as stream:
                while piece := await self._next_piece(stream):
                    yield piece
        finally:
            self._touch(-1)

    async def _next_piece(self, stream: Stream) -> bytes:
        """Or b"" at the end. Each has its own deadline: one around them all would count the time
        that the reader takes, and end whatever the reader is doing then."""
        async with self._operation():
            async for kind, payload in stream:
                if kind != DATA:
                    raise stream.refuse("file content that cannot be")
                return payload
        return b""

    async def write_stream(
        self, path: AnyPath, pieces: AsyncIterable[bytes], *, max_bytes: int | None = None
    ) -> int:
        """Replace the file, or make it with its parents: whole, or not at all. Returns its size;
        raises SandboxFileError when there is more than ``max_bytes``."""
        size = 0
        request = self._asking("write", path)
        async with self._operation() as connection:
            with connection.open(request) as stream:
                async for piece in pieces:
                    size += len(piece)
                    if max_bytes is not None and size > max_bytes:
                        raise SandboxFileError(
                            f"{path} is larger than {max_bytes} bytes", self.sandbox_id
                        )
                    if not await stream.write(piece):
                        break
                stream.end()
                await stream.finish()
        return size
