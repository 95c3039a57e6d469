"""A model endpoint for tests, over real HTTP, streamed or not: the APIs of OpenAI and Anthropic.

What it says is a script: a list of turns, or a function from the request to the next turn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any


@dataclass
class Turn:
    """``calls`` are names and arguments; arguments as text go out as they are, broken or not."""

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    status: int = 200
    finish: str | None = None
    tokens: tuple[int, int] = (100, 10)
    before: Callable[[], None] = lambda: None
    # In place of the events, or behind the first of them: what a broken endpoint sends.
    raw: bytes | None = None
    cut_after: int | None = None


Script = Sequence[Turn] | Callable[[dict[str, Any]], Turn]


@dataclass
class Conversation:
    """The requests that the server got, and the replies that it sends next."""

    script: Script
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, request: dict[str, Any]) -> Turn:
        with self.lock:
            self.requests.append(request)
            if callable(self.script):
                return self.script(request)
            return self.script[min(len(self.requests), len(self.script)) - 1]

    def tool_texts(self) -> list[str]:
        """The answers of tools in the last request, in either dialect."""
        found: list[str] = []
        for message in self.requests[-1]["messages"]:
            if message["role"] == "tool":
                found.append(message["content"])
            elif isinstance(message["content"], list):
                for block in message["content"]:
                    if block["type"] == "tool_result":
                        found.append("".join(c.get("text", "") for c in block["content"]))
        return found


@contextmanager
def model_server(script: Script) -> Iterator[Conversation]:
    conversation = Conversation(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            turn = conversation.next(request)
            turn.before()
            if turn.status != 200:
                self.answer(turn.status, "application/json", [b'{"error": {"message": "no"}}'])
            elif turn.raw is not None:
                kind = "text/event-stream" if request.get("stream") else "application/json"
                self.answer(200, kind, [turn.raw])
            elif not request.get("stream"):
                whole = openai_whole if "chat/completions" in self.path else anthropic_whole
                self.answer(200, "application/json", [json.dumps(whole(turn)).encode()])
            else:
                is_openai = self.path.endswith("/chat/completions")
                events = as_openai(turn) if is_openai else as_anthropic(turn)
                self.answer(200, "text/event-stream", islice(events, turn.cut_after),
                            cut=turn.cut_after is not None)  # fmt: skip

        def answer(self, status: int, kind: str, pieces: Any, *, cut: bool = False) -> None:
            try:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("transfer-encoding", "chunked")
                self.send_header("connection", "close")
                self.end_headers()
                for piece in filter(None, pieces):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
                if not cut:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                pass  # the client has gone: some tests are about that

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    conversation.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield conversation
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def parts(text: str, size: int = 7) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def as_openai(turn: Turn) -> Iterator[bytes]:
    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m",
                "choices": choices, **more}  # fmt: skip
        return f"data: {json.dumps(body)}\n\n".encode()

    yield chunk({"role": "assistant", "content": ""})
    for part in parts(turn.text):
        yield chunk({"content": part})
    for index, (name, arguments) in enumerate(turn.calls):
        call = {"index": index, "id": f"call_{index}", "type": "function"}
        yield chunk({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
        for part in parts(written(arguments)):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    yield chunk({}, turn.finish or ("tool_calls" if turn.calls else "stop"))
    inward, outward = turn.tokens
    usage = {
        "prompt_tokens": inward,
        "completion_tokens": outward,
        "total_tokens": sum(turn.tokens),
    }
    yield chunk({}, usage=usage)
    yield b"data: [DONE]\n\n"


def openai_whole(turn: Turn) -> dict[str, Any]:
    calls = [
        {"id": f"call_{index}", "type": "function",
         "function": {"name": name, "arguments": written(arguments)}}
        for index, (name, arguments) in enumerate(turn.calls)
    ]  # fmt: skip
    message = {"role": "assistant", "content": turn.text or None, "tool_calls": calls or None}
    reason = turn.finish or ("tool_calls" if calls else "stop")
    usage = dict(zip(("prompt_tokens", "completion_tokens"), turn.tokens, strict=True))
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}]}  # fmt: skip


def anthropic_whole(turn: Turn) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
    blocks += [
        {"type": "tool_use", "id": f"call_{index}", "name": name, "input": arguments}
        for index, (name, arguments) in enumerate(turn.calls)
    ]
    reason = turn.finish or ("tool_use" if turn.calls else "end_turn")
    usage = dict(zip(("input_tokens", "output_tokens"), turn.tokens, strict=True))
    return {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": blocks,
            "stop_reason": reason, "stop_sequence": None, "usage": usage}  # fmt: skip


def as_anthropic(turn: Turn) -> Iterator[bytes]:
    def event(kind: str, **body: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n".encode()

    inward, outward = turn.tokens
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [],
               "stop_reason": None, "stop_sequence": None,
               "usage": {"input_tokens": inward, "output_tokens": 1}}  # fmt: skip
    yield event("message_start", message=message)
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if turn.text:
        deltas = [{"type": "text_delta", "text": part} for part in parts(turn.text)]
        blocks.append(({"type": "text", "text": ""}, deltas))
    for index, (name, arguments) in enumerate(turn.calls):
        block = {"type": "tool_use", "id": f"call_{index}", "name": name, "input": {}}
        pieces = parts(written(arguments))
        blocks.append((block, [{"type": "input_json_delta", "partial_json": p} for p in pieces]))
    for index, (block, deltas) in enumerate(blocks):
        yield event("content_block_start", index=index, content_block=block)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    reason = turn.finish or ("tool_use" if turn.calls else "end_turn")
    delta = {"stop_reason": reason, "stop_sequence": None}
    yield event("message_delta", delta=delta, usage={"output_tokens": outward})
    yield event("message_stop")
