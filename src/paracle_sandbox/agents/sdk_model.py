"""Calls models through vendors' SDKs: it sends requests, reads streams and translates errors."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..tools import Tool
from .conversation import Message, Reply, ToolCall
from .model import ModelBrokeOff, ModelError, OnText, make_missing_sdk_error


@dataclass
class ReplyReader(ABC):
    """Collects a reply that comes in pieces or whole."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str = ""

    @abstractmethod
    def read_event(self, piece: Any) -> str:
        """Take in one piece of a stream and return the text in it."""

    @abstractmethod
    def read_whole(self, answer: Any) -> str:
        """Take in a reply that was not streamed and return the text in it."""

    @abstractmethod
    def reply(self) -> Reply:
        """Return the whole reply."""

    def to_tool_calls(self) -> tuple[ToolCall, ...]:
        """Return the calls in the order in which they began."""
        return tuple(
            ToolCall(call["id"] or f"call_{index}", call["name"], call["arguments"])
            for index, call in sorted(self.calls.items())
        )


class SdkModel(ABC):
    """A model that a vendor's SDK calls.

    ``sdk`` is the module of the vendor, ``client`` and ``error`` are classes in it. ``connection``
    are the arguments of the client, and ``options`` go into each request. Without ``stream``
    replies come whole, for endpoints that cannot stream."""

    sdk: ClassVar[str]
    client: ClassVar[str]
    error: ClassVar[str]

    def __init__(
        self, name: str, connection: dict[str, Any], options: dict[str, Any], *, stream: bool = True
    ) -> None:
        try:
            module = importlib.import_module(self.sdk)
        except ImportError as error:
            raise make_missing_sdk_error(error) from None
        self.name = name
        self._options = options
        self._stream = stream
        self._error: type[Exception] = getattr(module, self.error)
        try:
            self._client = getattr(module, self.client)(**connection)
        except self._error as error:
            raise ModelError(f"The client of the model cannot be made: {error}") from None

    @abstractmethod
    def make_request(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """Return the request in the format of the endpoint."""

    @abstractmethod
    async def send(self, request: dict[str, Any]) -> Any:
        """Send a request and return the stream of its response, or the whole response."""

    @abstractmethod
    def make_reader(self) -> ReplyReader:
        """Return a reader for one reply."""

    async def reply(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText
    ) -> Reply:
        reader = self.make_reader()
        answer = await self._send(self.make_request(system, messages, tools))
        if not self._stream:
            self._read_whole(answer, reader, on_text)
            return reader.reply()
        try:
            await self._read_stream(answer, reader, on_text)
        finally:
            await answer.close()
        return reader.reply()

    async def _send(self, request: dict[str, Any]) -> Any:
        try:
            return await self.send(request)
        except self._error as error:
            raise ModelError(f"The model {self.name} did not answer: {error}") from error
        except TypeError as error:  # an SDK raises it when it has no key
            raise ModelError(f"No request can be sent to the model {self.name}: {error}") from error
        except ValueError as error:  # the response is not JSON, and was not streamed
            raise ModelBrokeOff(
                f"The response of the model {self.name} is not JSON: {error}"
            ) from error

    def _read_whole(self, answer: Any, reader: ReplyReader, on_text: OnText) -> None:
        try:
            reader.text = reader.read_whole(answer)
        except (AttributeError, TypeError) as error:  # the SDKs pass on an unknown shape as it is
            raise ModelBrokeOff(
                f"The response of the model {self.name} does not fit its API: {str(answer)[:200]!r}"
            ) from error
        if reader.text:
            on_text(reader.text)

    async def _read_stream(self, stream: Any, reader: ReplyReader, on_text: OnText) -> None:
        pieces = aiter(stream)
        while True:
            try:
                text = reader.read_event(await anext(pieces))
            except StopAsyncIteration:
                return
            except Exception as error:  # the SDKs pass on what their transport raises
                reason = str(error) or type(error).__name__
                raise ModelBrokeOff(
                    f"The model {self.name} broke off in the middle: {reason}"
                ) from error
            reader.text += text
            if text:
                on_text(text)

    async def close(self) -> None:
        await self._client.close()
