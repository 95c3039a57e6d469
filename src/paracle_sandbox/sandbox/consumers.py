"""Callbacks that see the output of a command as it comes."""

from __future__ import annotations

import asyncio
import codecs
import inspect
from collections.abc import Callable

# What a plain function returns does not matter; what an async one returns is awaited.
TextCallback = Callable[[str], object]
BytesCallback = Callable[[str, bytes], object]

_decoder = codecs.getincrementaldecoder("utf-8")


class Consumers:
    """Plain or async functions. Text comes in whole characters, however the bytes were cut."""

    def __init__(
        self,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        on_output_bytes: BytesCallback | None = None,
    ) -> None:
        self._text = {
            name: (callback, _decoder("replace"))
            for name, callback in (("stdout", on_stdout), ("stderr", on_stderr))
            if callback is not None
        }
        self._bytes = on_output_bytes
        self._waiting: asyncio.Future[object] | None = None
        self._given_up = False

    def __bool__(self) -> bool:
        return bool(self._text) or self._bytes is not None

    async def deliver(self, name: str, chunk: bytes) -> None:
        if self._given_up:
            return
        if self._bytes is not None:
            await self._settle(self._bytes(name, chunk))
        if name in self._text:
            callback, decoder = self._text[name]
            if text := decoder.decode(chunk):
                await self._settle(callback(text))

    async def finish(self) -> None:
        """Hand over what a last, incomplete character left behind."""
        if self._given_up:
            return
        for callback, decoder in self._text.values():
            if text := decoder.decode(b"", final=True):
                await self._settle(callback(text))

    def give_up(self) -> None:
        """Cancel an async callback that is still at work, and call none again: the command has
        been stopped, and what is left of its output may be a thousand calls more."""
        self._given_up = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _settle(self, answer: object) -> None:
        if not inspect.isawaitable(answer):
            return
        # A task of its own, so that give_up() can end it and not the one that delivers.
        self._waiting = asyncio.ensure_future(answer)
        try:
            await asyncio.wait((self._waiting,))
            if not self._waiting.cancelled():
                self._waiting.result()
        finally:
            self._waiting.cancel()
            self._waiting = None
