"""Models behind the messages API of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tools import Tool
from .conversation import Message, Reply, ToolCall, Usage
from .model import ModelError, OnText, missing_sdk

# The API wants a number; agents that write files need a large one.
MAX_TOKENS = 16_384


class AnthropicModel:
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
    ) -> None:
        try:
            import anthropic
        except ImportError as error:
            raise missing_sdk(error) from None
        self.name = name
        self._options: dict[str, Any] = {"max_tokens": max_tokens or MAX_TOKENS}
        if temperature is not None:
            # Not every model takes it, and the SDK has no word for it any more.
            self._options["extra_body"] = {"temperature": temperature}
        self._error = anthropic.AnthropicError
        try:
            self._client = anthropic.AsyncAnthropic(
                base_url=base_url, api_key=api_key, timeout=timeout_seconds,
                max_retries=max_retries,
            )  # fmt: skip
        except anthropic.AnthropicError as error:
            raise ModelError(f"The model cannot be asked: {error}") from None

    async def reply(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool], on_text: OnText
    ) -> Reply:
        request: dict[str, Any] = {
            "model": self.name,
            "system": system,
            "messages": translated(messages),
            "stream": True,
            **self._options,
        }
        if tools:
            request["tools"] = [tool.to_anthropic() for tool in tools]
        heard = _Heard()
        try:
            async for event in await self._client.messages.create(**request):
                heard.take(event, on_text)
        except self._error as error:
            raise ModelError(f"The model {self.name} did not answer: {error}") from error
        except TypeError as error:  # how the SDK says that it has no key
            raise ModelError(f"The model {self.name} cannot be asked: {error}") from error
        return heard.reply()

    async def close(self) -> None:
        await self._client.close()


@dataclass
class _Heard:
    """A reply as it comes in pieces."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    input_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""

    def take(self, event: Any, on_text: OnText) -> None:
        if event.type == "message_start":
            usage = event.message.usage
            self.input_tokens = usage.input_tokens or 0
            self.output_tokens = usage.output_tokens or 0
        elif event.type == "content_block_start" and event.content_block.type == "tool_use":
            block = event.content_block
            self.calls[event.index] = {"id": block.id, "name": block.name, "arguments": ""}
        elif event.type == "content_block_delta":
            if event.delta.type == "text_delta":
                self.text += event.delta.text
                on_text(event.delta.text)
            elif event.delta.type == "input_json_delta" and event.index in self.calls:
                self.calls[event.index]["arguments"] += event.delta.partial_json
        elif event.type == "message_delta":
            self.finish = event.delta.stop_reason or self.finish
            self.output_tokens = event.usage.output_tokens or self.output_tokens

    def reply(self) -> Reply:
        calls = tuple(ToolCall(**call) for _, call in sorted(self.calls.items()))
        usage = Usage(self.input_tokens, self.output_tokens)
        return Reply(self.text, calls, usage, cut_off=self.finish == "max_tokens")


def translated(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation in Anthropic's words: turns alternate, and tools' answers are the user's."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        elif blocks:
            found.append({"role": role, "content": blocks})
    return found


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        content: list[dict[str, Any]] = [{"type": "text", "text": message.text or "(no output)"}]
        content += [
            {"type": "image", "source": {"type": "base64", "media_type": image.media_type,
                                         "data": image.base64}}
            for image in message.images
        ]  # fmt: skip
        return [{"type": "tool_result", "tool_use_id": message.call_id, "content": content,
                 "is_error": message.is_error}]  # fmt: skip
    blocks: list[dict[str, Any]] = []
    if message.text.strip():
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in message.calls
    ]
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """The API takes objects only; what was broken is explained in the tool's answer."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
