"""The output of a program until it is sent: a little in memory, the rest in a file without a name.

Fifty programs with as much output as is allowed must not take fifty times that memory. So an
answer with a large text is sent piece by piece, as it is read from the file.
"""

from __future__ import annotations

import codecs
import json
import logging
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...sandbox.outcome import output_breach

logger = logging.getLogger(__name__)

IN_MEMORY = 64 << 10
_PIECE = 64 << 10


class SpooledText:
    """A text in a file. It takes the place of a str in an answer."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()

    def pieces(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offset = 0
        while True:
            self._file.seek(offset)  # others read the same file in between
            raw = self._file.read(_PIECE)
            offset += len(raw)
            if text := decoder.decode(raw, final=not raw):
                yield text
            if not raw:
                return


Text = str | SpooledText


class Spool:
    """The output of one program, up to ``limit`` bytes of both streams together."""

    def __init__(self, directory: Path, limit: int, sandbox_id: str) -> None:
        self._directory = directory
        self._limit = limit
        self._sandbox_id = sandbox_id
        self._size = 0
        self._broken = False
        self._held = {"stdout": bytearray(), "stderr": bytearray()}
        self._files: dict[str, IO[bytes]] = {}

    @property
    def truncated(self) -> bool:
        return self._broken or self._size > self._limit

    def take(self, name: str, chunk: bytes) -> None:
        """Take a piece of output. Raises ResourceLimitError when it is too much, which ends the
        program."""
        room = max(0, self._limit - self._size)
        self._size += len(chunk)
        self._put(name, chunk[:room])
        if self._size > self._limit:
            raise output_breach(self._size, self._limit).error(self._sandbox_id)

    def _put(self, name: str, chunk: bytes) -> None:
        try:
            if name in self._files:
                self._files[name].write(chunk)
            elif len(self._held[name]) + len(chunk) <= IN_MEMORY:
                self._held[name] += chunk
            else:
                file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
                self._files[name] = file
                file.write(self._held[name] + chunk)
                self._held[name].clear()
        except OSError as error:
            if not self._broken:
                logger.error("Output is cut short, it cannot be kept: %s", error)
            self._broken = True

    def text_of(self, name: str) -> Text:
        if name in self._files:
            return SpooledText(self._files[name])
        return self._held[name].decode("utf-8", "replace")

    def close(self) -> None:
        """Close the files, if nothing of the output is sent."""
        for file in self._files.values():
            file.close()


class HeldText:
    """A text in memory that is too large to be sent in one piece."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def of(cls, text: str) -> str | HeldText:
        return cls(text) if len(text) > IN_MEMORY else text

    def pieces(self) -> Iterator[str]:
        for start in range(0, len(self._text), _PIECE):
            yield self._text[start : start + _PIECE]

    def close(self) -> None:
        self._text = ""


def is_large(answer: dict[str, Any]) -> bool:
    return any(
        isinstance(value, SpooledText | HeldText) or (isinstance(value, dict) and is_large(value))
        for value in answer.values()
    )


def json_pieces(answer: dict[str, Any]) -> Iterator[bytes]:
    """Yield the answer as JSON. Its large texts are read as they are needed, and then closed."""
    mark = secrets.token_hex(16)
    texts: list[SpooledText | HeldText] = []

    def stand_in(value: Any) -> str:
        texts.append(value)
        return f"{mark}{len(texts) - 1}{mark}"

    frame = json.dumps(answer, default=stand_in, ensure_ascii=False, separators=(",", ":"))
    try:
        for number, part in enumerate(frame.split(mark)):
            if number % 2 == 0:
                yield part.encode()
                continue
            for piece in texts[int(part)].pieces():
                yield json.dumps(piece, ensure_ascii=False)[1:-1].encode()
    finally:
        for text in texts:
            text.close()
