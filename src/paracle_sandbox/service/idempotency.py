"""Requests that may be sent twice: the second gets the answer of the first.

With an ``Idempotency-Key`` a POST runs to its end even when its client goes away, and whoever
sends it again, with the same body, waits for that answer or gets it at once. Answers are kept in
memory for a day at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from .faults import BadRequest, fault_body
from .gate import App, Message, Receive, Scope, Send

MAX_ANSWERS = 10_000
MAX_KEPT = 64 << 20
MAX_KEY = 255
_DAY = 86_400.0


@dataclass
class _Answer:
    body_hash: bytes
    done: asyncio.Future[list[Message]]
    made: float = field(default_factory=time.monotonic)
    size: int = 0


class Idempotency:
    """Wraps the application inside the gate."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._answers: OrderedDict[tuple[str, ...], _Answer] = OrderedDict()
        self._kept = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key_of(scope)
        if key is None:
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        digest = hashlib.sha256(body).digest()
        self._forget_old()
        answer = self._answers.get(key)
        if answer is None:
            answer = self._begin(key, digest, scope, body)
        if answer.body_hash != digest:
            await _refuse(send)
            return
        for message in await asyncio.shield(answer.done):
            await send({**message, "headers": list(message.get("headers", []))})

    def _begin(self, key: tuple[str, ...], digest: bytes, scope: Scope, body: bytes) -> _Answer:
        answer = _Answer(digest, asyncio.get_running_loop().create_future())
        self._answers[key] = answer
        task = asyncio.create_task(self._run(key, answer, scope, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    async def _run(self, key: tuple[str, ...], answer: _Answer, scope: Scope, body: bytes) -> None:
        messages: list[Message] = []
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # this client never goes away
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001  whoever waits for it gets it
            self._answers.pop(key, None)
            answer.done.set_exception(error)
            return
        answer.done.set_result(messages)
        self._keep(key, answer, messages)

    def _keep(self, key: tuple[str, ...], answer: _Answer, messages: list[Message]) -> None:
        answer.size = sum(len(message.get("body", b"")) for message in messages)
        self._kept += answer.size
        if messages and messages[0].get("status", 500) in (429, 502, 503):
            self._drop(key)  # nothing was done: the next one may try
        while self._kept > MAX_KEPT or len(self._answers) > MAX_ANSWERS:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: tuple[str, ...]) -> None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._kept -= answer.size

    def _forget_old(self) -> None:
        horizon = time.monotonic() - _DAY
        while self._answers:
            key, oldest = next(iter(self._answers.items()))
            if oldest.made > horizon:
                return
            self._drop(key)


def _key_of(scope: Scope) -> tuple[str, ...] | None:
    """What makes two requests the same; None for those that are not asked to be."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith("/stream"):
        return None
    given: Any = dict(scope["headers"]).get(b"idempotency-key")
    if not given or len(given) > MAX_KEY:
        return None
    caller = scope["state"]["caller"]
    user = dict(scope["headers"]).get(b"x-sandbox-user", b"")
    query = scope.get("query_string", b"")
    return (caller.key_id, scope["path"], query.decode("latin-1"), given.decode("latin-1"),
            user.decode("latin-1"))  # fmt: skip


async def _whole_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _refuse(send: Send) -> None:
    import json

    fault = BadRequest("This Idempotency-Key was used with another body")
    body = json.dumps(fault_body(fault)).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 422, "headers": headers})
    await send({"type": "http.response.body", "body": body})
