"""Requests that may be sent twice: the second gets the answer of the first.

With an ``Idempotency-Key`` a POST runs to its end even when its client goes away, and whoever
sends it again, with the same body, waits for that answer or gets it at once. Answers are kept
for a day, also when the service is started anew in between; a request that was under way when it
ended is not run again, since it may have run half.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import BadRequest, Conflict, ServiceFault, Unprocessable
from ..users.names import user_in
from .idempotency_store import Answer, Answers, Asked

logger = logging.getLogger(__name__)

MAX_KEY = 255
# Nothing was done, as with all that is refused (4xx): the next one may try.
_NOT_KEPT = (502, 503)
# Secrets are in no file; a sandbox of a remote client ends with the service, and so its answer.
_UNKEPT = ("/keys", "/v1/sandboxes")


class Unfinished(Conflict):
    """The service ended while the request ran."""

    kind = "unknown_outcome"


@dataclass(frozen=True)
class _Request:
    asked: Asked
    body: bytes
    answers: Answers

    @property
    def key(self) -> bytes:
        return self.asked.key

    @property
    def body_hash(self) -> bytes:
        return self.asked.body_hash


class Idempotency:
    """Wraps the application inside the gate, which tells the faults it raises."""

    def __init__(self, app: ASGIApp, kept: Answers) -> None:
        self._app = app
        self._kept = kept
        self._unkept = Answers(None)
        self._running: dict[bytes, tuple[bytes, asyncio.Task[Answer]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _given(scope)
        if not given:
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        answers = self._unkept if scope["path"] in _UNKEPT else self._kept
        asked = Asked(_key_of(scope, given), _owner_of(scope), hashlib.sha256(body).digest())
        request = _Request(asked, body, answers)
        if len(given) > MAX_KEY:
            raise BadRequest(f"The Idempotency-Key is longer than {MAX_KEY} characters")
        answer = await self._answer(request, scope)
        start = {"type": "http.response.start", "status": answer.status}
        await send({**start, "headers": list(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, request: _Request, scope: Scope) -> Answer:
        """Of the one that runs, or ran, or is begun now. Raises ServiceFault."""
        if request.key in self._running:
            body_hash, task = self._running[request.key]
            _check_same(body_hash, request)
            return await asyncio.shield(task)
        task = asyncio.create_task(self._run(request, scope))
        self._running[request.key] = (request.body_hash, task)
        task.add_done_callback(lambda _: self._running.pop(request.key, None))
        return await asyncio.shield(task)

    async def _run(self, request: _Request, scope: Scope) -> Answer:
        answers = request.answers
        before = await answers.in_thread(_found_or_begun, request)
        if before is not None:
            _check_same(before.body_hash, request)
            if before.status is None:
                raise Unfinished(
                    "The service ended before this request did, which may have run in part. "
                    "Look, and send what is to run again under another Idempotency-Key."
                )
            return before
        try:
            answer = await self._run_once(request, scope)
        except ServiceFault:
            # It was refused before anything was done.
            await answers.in_thread(_try, answers.drop, request.key)
            raise
        if did_nothing(answer.status):
            await answers.in_thread(_try, answers.drop, request.key)
        else:
            kept = (answer.status, answer.headers, answer.body)
            await answers.in_thread(_try, answers.complete, request.asked, *kept)
        return answer

    async def _run_once(self, request: _Request, scope: Scope) -> Answer:
        messages: list[Message] = []
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # this client never goes away
            given = True
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive, send)
        start = messages[0]
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return Answer(request.body_hash, start["status"], list(start.get("headers", [])), body)


def did_nothing(status: int | None) -> bool:
    """Whether a request that was answered so can be run as if for the first time."""
    return status is not None and (400 <= status < 500 or status in _NOT_KEPT)


def _found_or_begun(request: _Request) -> Answer | None:
    """The answer of the same request before; this one is written down when there is none."""
    before = _found(request)
    if before is None:
        _try(request.answers.begin, request.asked)
    return before


def _found(request: _Request) -> Answer | None:
    try:
        return request.answers.find(request.key)
    except sqlite3.Error as error:
        logger.error("Kept answers cannot be read: %s", error)
        return None


def _try(action: Any, *arguments: Any) -> None:
    """A full disk must not keep a request from running: it then is kept nowhere, and said so."""
    try:
        action(*arguments)
    except sqlite3.Error as error:
        logger.error("An answer cannot be kept: %s", error)


def _check_same(body_hash: bytes, request: _Request) -> None:
    if body_hash != request.body_hash:
        raise Unprocessable("This Idempotency-Key was used with another body")


def _given(scope: Scope) -> bytes:
    """The key of a request that may be sent again; empty for all others."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith("/stream"):
        return b""
    return next((value for name, value in scope["headers"] if name == b"idempotency-key"), b"")


def _key_of(scope: Scope, given: bytes) -> bytes:
    """What makes two requests the same, but for their body."""
    query = scope.get("query_string", b"")
    user = _user(_user_header(scope))
    return _digest(_caller(scope), scope["path"].encode(), query, given, user)


def _owner_of(scope: Scope) -> bytes:
    """Whose quota it is: the key's, for the user it acts for."""
    parts: list[str] = scope["path"].split("/")
    is_named = len(parts) > 2 and parts[1] == "sandbox"
    return _digest(_caller(scope), _user(parts[2] if is_named else _user_header(scope)))


def _caller(scope: Scope) -> bytes:
    key_id: str = scope["state"]["caller"].key_id
    return key_id.encode()


def _user_header(scope: Scope) -> str:
    found = (value for name, value in scope["headers"] if name == b"x-sandbox-user")
    return next(found, b"").decode("latin-1")


def _user(named: str) -> bytes:
    """One user is one owner, in whatever way its letters are encoded."""
    try:
        return user_in(named).encode()
    except BadRequest:  # nobody is named, or none that there could be: that is refused further in
        return named.encode()


def _digest(*parts: bytes) -> bytes:
    framed = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    return hashlib.sha256(framed).digest()


async def _whole_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
