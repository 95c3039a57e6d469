"""Models behind the chat API of OpenAI, and of the many who speak it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tools import Tool
from .conversation import Message, Reply, ToolCall, Usage
from .model import ModelError, OnText, missing_sdk


class OpenAIModel:
    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        timeout_seconds: float = 300.0,
        max_retries: int = 3,
        new_token_name: bool = False,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise missing_sdk(error) from None
        self.name = name
        self._options: dict[str, Any] = {}
        if temperature is not None:
            self._options["temperature"] = temperature
        if max_tokens is not None:
            # OpenAI has renamed it; the others have not.
            key = "max_completion_tokens" if new_token_name else "max_tokens"
            self._options[key] = max_tokens
        self._error = openai.OpenAIError
        try:
            self._client = openai.AsyncOpenAI(
                base_url=base_url, api_key=api_key, timeout=timeout_seconds,
                max_retries=max_retries,
            )  # fmt: skip
        except openai.OpenAIError as error:
            raise ModelError(f"The model cannot be asked: {error}") from None

    async def reply(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText
    ) -> Reply:
        request: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": "system", "content": system}, *translated(messages)],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        if tools:
            request["tools"] = [tool.to_openai() for tool in tools]
        heard = _Heard()
        try:
            async for chunk in await self._client.chat.completions.create(**request):
                heard.take(chunk, on_text)
        except self._error as error:
            raise ModelError(f"The model {self.name} did not answer: {error}") from error
        return heard.reply()

    async def close(self) -> None:
        await self._client.close()


@dataclass
class _Heard:
    """A reply as it comes in pieces."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    finish: str = ""

    def take(self, chunk: Any, on_text: OnText) -> None:
        if chunk.usage is not None:
            self.usage = Usage(chunk.usage.prompt_tokens or 0, chunk.usage.completion_tokens or 0)
        for choice in chunk.choices or ():
            self.finish = choice.finish_reason or self.finish
            if choice.delta is None:
                continue
            if choice.delta.content:
                self.text += choice.delta.content
                on_text(choice.delta.content)
            for piece in choice.delta.tool_calls or ():
                self._take_call(piece)

    def _take_call(self, piece: Any) -> None:
        # Some endpoints leave the index out, and send each call whole.
        index = len(self.calls) if piece.index is None else piece.index
        call = self.calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        call["id"] = piece.id or call["id"]
        if piece.function is not None:
            call["name"] += piece.function.name or ""
            call["arguments"] += piece.function.arguments or ""

    def reply(self) -> Reply:
        calls = tuple(
            ToolCall(call["id"] or f"call_{index}", call["name"], call["arguments"])
            for index, call in sorted(self.calls.items())
        )
        return Reply(self.text, calls, self.usage, cut_off=self.finish == "length")


def translated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's words. Pictures follow a run of tools' answers, which may only
    hold text."""
    found: list[dict[str, Any]] = []
    pictures: list[dict[str, Any]] = []
    for message in messages:
        if message.role != "tool" and pictures:
            found.append({"role": "user", "content": pictures})
            pictures = []
        if message.role == "tool":
            found.append({"role": "tool", "tool_call_id": message.call_id, "content": message.text})
            pictures += [
                {"type": "image_url",
                 "image_url": {"url": f"data:{image.media_type};base64,{image.base64}"}}
                for image in message.images
            ]  # fmt: skip
        elif message.role == "assistant":
            found.append(_assistant(message))
        else:
            found.append({"role": "user", "content": message.text})
    if pictures:
        found.append({"role": "user", "content": pictures})
    return found


def _assistant(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": message.text or None}
    if message.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in message.calls
        ]  # fmt: skip
    return said
