"""Calls models through the messages API of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..tools import Tool
from .conversation import Message, Reply, Usage
from .sdk_model import ReplyReader, SdkModel

# The API demands a limit, and agents that write files need a large one.
MAX_TOKENS = 16_384


class AnthropicModel(SdkModel):
    """A model behind the messages API of Anthropic."""

    sdk, client, error = "anthropic", "AsyncAnthropic", "AnthropicError"

    def __init__(
        self,
        name: str,
        connection: dict[str, Any],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        stream: bool = True,
    ) -> None:
        options: dict[str, Any] = {"max_tokens": max_tokens or MAX_TOKENS}
        if temperature is not None:
            # Not every model takes a temperature, and the SDK has no parameter for it any more.
            options["extra_body"] = {"temperature": temperature}
        super().__init__(name, connection, options, stream=stream)

    def make_request(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> dict[str, Any]:
        given = {"tools": [tool.to_anthropic() for tool in tools]} if tools else {}
        request = {
            "model": self.name,
            "system": system,
            "messages": to_anthropic_messages(messages),
        }
        return {**request, "stream": self._stream, **self._options, **given}

    async def send(self, request: dict[str, Any]) -> Any:
        return await self._client.messages.create(**request)

    def make_reader(self) -> ReplyReader:
        return _AnthropicReplyReader()


@dataclass
class _AnthropicReplyReader(ReplyReader):
    input_tokens: int = 0
    output_tokens: int = 0

    def read_event(self, event: Any) -> str:
        if event.type == "message_start":
            usage = event.message.usage
            self.input_tokens = usage.input_tokens or 0
            self.output_tokens = usage.output_tokens or 0
        elif event.type == "content_block_start" and event.content_block.type == "tool_use":
            block = event.content_block
            self.calls[event.index] = {"id": block.id, "name": block.name, "arguments": ""}
        elif event.type == "content_block_delta":
            if event.delta.type == "text_delta":
                return str(event.delta.text)
            if event.delta.type == "input_json_delta" and event.index in self.calls:
                self.calls[event.index]["arguments"] += event.delta.partial_json
        elif event.type == "message_delta":
            self.finish = event.delta.stop_reason or self.finish
            self.output_tokens = event.usage.output_tokens or self.output_tokens
        return ""

    def read_whole(self, answer: Any) -> str:
        text = ""
        for index, block in enumerate(answer.content):
            if block.type == "text":
                text += block.text
            elif block.type == "tool_use":
                given = json.dumps(block.input)
                self.calls[index] = {"id": block.id, "name": block.name, "arguments": given}
        self.finish = answer.stop_reason or ""
        self.input_tokens = answer.usage.input_tokens or 0
        self.output_tokens = answer.usage.output_tokens or 0
        return text

    def reply(self) -> Reply:
        usage = Usage(self.input_tokens, self.output_tokens)
        return Reply(self.text, self.to_tool_calls(), usage, cut_off=self.finish == "max_tokens")


def to_anthropic_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a conversation. In this API turns alternate, and tool results belong to the user."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _to_blocks(message)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        elif blocks:
            found.append({"role": role, "content": blocks})
    return found


def _to_blocks(message: Message) -> list[dict[str, Any]]:
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
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.as_object()}
        for call in message.calls
    ]
    return blocks
