"""Calls models through the chat API of OpenAI, which many other endpoints have too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..tools import Tool
from .conversation import Message, Reply, Usage
from .sdk_model import ReplyReader, SdkModel


class OpenAIModel(SdkModel):
    """A model behind the chat API of OpenAI, or behind an endpoint that has the same API."""

    sdk, client, error = "openai", "AsyncOpenAI", "OpenAIError"

    def __init__(
        self,
        name: str,
        connection: dict[str, Any],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        new_token_name: bool = False,
        stream: bool = True,
    ) -> None:
        # OpenAI has renamed this parameter; the other endpoints have not.
        tokens = "max_completion_tokens" if new_token_name else "max_tokens"
        given = {"temperature": temperature, tokens: max_tokens}
        options = {key: value for key, value in given.items() if value is not None}
        super().__init__(name, connection, options, stream=stream)

    def make_request(
        self, system: str, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> dict[str, Any]:
        conversation = [{"role": "system", "content": system}, *to_openai_messages(messages)]
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        stream = streamed if self._stream else {"stream": False}
        given = {"tools": [tool.to_openai() for tool in tools]} if tools else {}
        return {"model": self.name, "messages": conversation, **stream, **self._options, **given}

    async def send(self, request: dict[str, Any]) -> Any:
        return await self._client.chat.completions.create(**request)

    def make_reader(self) -> ReplyReader:
        return _OpenAIReplyReader()


@dataclass
class _OpenAIReplyReader(ReplyReader):
    """Reads a reply. ``position_of`` maps an index of the endpoint to the call it means now."""

    usage: Usage = field(default_factory=Usage)
    position_of: dict[int, int] = field(default_factory=dict)

    def read_event(self, chunk: Any) -> str:
        text = ""
        self._read_usage(chunk.usage)
        for choice in chunk.choices or ():
            self.finish = choice.finish_reason or self.finish
            if choice.delta is None:
                continue
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                self._read_call(piece)
        return text

    def read_whole(self, answer: Any) -> str:
        self._read_usage(answer.usage)
        choice = answer.choices[0] if answer.choices else None
        if choice is None or choice.message is None:
            return ""
        self.finish = choice.finish_reason or ""
        for call in choice.message.tool_calls or ():
            self._read_call(call)
        return str(choice.message.content or "")

    def _read_usage(self, usage: Any) -> None:
        if usage is not None:
            self.usage = Usage(usage.prompt_tokens or 0, usage.completion_tokens or 0)

    def _read_call(self, piece: Any) -> None:
        call = self.calls.setdefault(
            self._find_position(piece), {"id": "", "name": "", "arguments": ""}
        )
        call["id"] = call["id"] or piece.id or ""
        if piece.function is not None:
            call["name"] += piece.function.name or ""
            given = piece.function.arguments or ""
            # Some endpoints send the arguments as an object rather than as JSON text.
            call["arguments"] += given if isinstance(given, str) else json.dumps(given)

    def _find_position(self, piece: Any) -> int:
        """Return which call a piece belongs to, counted in the order in which calls began."""
        new = len(self.calls)
        # Some endpoints leave out the index and send each call whole.
        index = getattr(piece, "index", None)
        if index is None:
            return new
        held = self.calls.get(self.position_of.get(index, new))
        named = piece.function is not None and piece.function.name
        # Some send every call under the same index. A new id alone does not mean a new call:
        # other endpoints make one for every piece.
        if held is None or (named and piece.id and held["id"] not in ("", piece.id)):
            self.position_of[index] = new
        return self.position_of[index]

    def reply(self) -> Reply:
        return Reply(self.text, self.to_tool_calls(), self.usage, cut_off=self.finish == "length")


def to_openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a conversation. In this API tool results hold text only, so that their images follow
    in a message of the user."""
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
            found.append(_to_assistant_message(message))
        else:
            found.append({"role": "user", "content": message.text})
    if pictures:
        found.append({"role": "user", "content": pictures})
    return found


def _to_assistant_message(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": message.text or None}
    if message.calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": json.dumps(call.as_object())}}
            for call in message.calls
        ]  # fmt: skip
    return turn
