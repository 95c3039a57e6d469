"""What models behind vendors' SDKs share: how they are asked, for a stream or for a whole answer,
and how that fails."""

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
    """A reply as it comes, in pieces or whole."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str = ""

    @abstractmethod
    def read_event(self, piece: Any) -> str:
        """One piece of the stream; the text in it, for whoever listens."""

    @abstractmethod
    def read_whole(self, answer: Any) -> str:
        """An answer that was not streamed; the text in it."""

    @abstractmethod
    def reply(self) -> Reply: ...

    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call["id"] or f"call_{index}", call["name"], call["arguments"])
            for index, call in sorted(self.calls.items())
        )


class SdkModel(ABC):
    """``sdk`` is the module of a vendor, ``client`` and ``error`` are classes in it. ``connection``
    is what its client is made with, ``options`` what goes into each request. Without ``stream``
    answers are asked for whole: not every endpoint can do otherwise."""

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
            raise ModelError(f"The model cannot be asked: {error}") from None

    @abstractmethod
    def make_request(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """What the endpoint is sent, in its own words."""

    @abstractmethod
    async def send(self, request: dict[str, Any]) -> Any:
        """The stream of an answer, or all of it."""

    @abstractmethod
    def make_reader(self) -> ReplyReader:
        """Takes the answer in."""

    async def reply(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText
    ) -> Reply:
        heard = self.make_reader()
        answer = await self._send(self.make_request(system, messages, tools))
        if not self._stream:
            self._read_whole(answer, heard, on_text)
            return heard.reply()
        try:
            await self._read_stream(answer, heard, on_text)
        finally:
            await answer.close()
        return heard.reply()

    async def _send(self, request: dict[str, Any]) -> Any:
        try:
            return await self.send(request)
        except self._error as error:
            raise ModelError(f"The model {self.name} did not answer: {error}") from error
        except TypeError as error:  # how an SDK says that it has no key
            raise ModelError(f"The model {self.name} cannot be asked: {error}") from error
        except ValueError as error:  # what came is no JSON, and was not streamed
            raise ModelBrokeOff(f"The model {self.name} answered no JSON: {error}") from error

    def _read_whole(self, answer: Any, heard: ReplyReader, on_text: OnText) -> None:
        try:
            heard.text = heard.read_whole(answer)
        except (AttributeError, TypeError) as error:  # the SDKs pass on any other shape as it came
            raise ModelBrokeOff(
                f"The model {self.name} gave no answer of its API: {str(answer)[:200]!r}"
            ) from error
        if heard.text:
            on_text(heard.text)

    async def _read_stream(self, stream: Any, heard: ReplyReader, on_text: OnText) -> None:
        pieces = aiter(stream)
        while True:
            try:
                said = heard.read_event(await anext(pieces))
            except StopAsyncIteration:
                return
            except Exception as error:  # the SDKs pass on whatever their transport raises
                reason = str(error) or type(error).__name__
                raise ModelBrokeOff(
                    f"The model {self.name} broke off in the middle: {reason}"
                ) from error
            heard.text += said
            if said:
                on_text(said)

    async def close(self) -> None:
        await self._client.close()
