"""Middleware: a request with an ``Idempotency-Key`` runs once, however often it is sent.

Such a POST runs to its end even when its client goes away. Sent again with the same body, it waits
for the first answer, or gets it at once. Answers are kept for a day, also over a restart. A request
that was under way when the service ended is not run again, because it may have run in part.
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
from .idempotency_store import Answer, Answers, RequestIdentity

logger = logging.getLogger(__name__)

MAX_KEY = 255
# With these, as with refusals (4xx), nothing was done: the request may be sent again.
_NOT_KEPT = (502, 503)
# Their answers are in memory only: one is a secret, the other ends with the service.
_UNKEPT = ("/keys", "/v1/sandboxes")


class Unfinished(Conflict):
    """The service ended while the request ran."""

    kind = "unknown_outcome"


@dataclass(frozen=True)
class _Request:
    identity: RequestIdentity
    body: bytes
    answers: Answers

    @property
    def key(self) -> bytes:
        return self.identity.key

    @property
    def body_hash(self) -> bytes:
        return self.identity.body_hash


class Idempotency:
    """Wraps the application inside the gate, which answers the faults it raises."""

    def __init__(self, app: ASGIApp, kept: Answers) -> None:
        self._app = app
        self._kept = kept
        self._unkept = Answers(None)
        self._running: dict[bytes, tuple[bytes, asyncio.Task[Answer]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _idempotency_key(scope)
        if not given:
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        answers = self._unkept if scope["path"] in _UNKEPT else self._kept
        identity = RequestIdentity(
            _key_of(scope, given), _owner_of(scope), hashlib.sha256(body).digest()
        )
        request = _Request(identity, body, answers)
        if len(given) > MAX_KEY:
            raise BadRequest(f"The Idempotency-Key is longer than {MAX_KEY} characters")
        answer = await self._answer(request, scope)
        start = {"type": "http.response.start", "status": answer.status}
        await send({**start, "headers": list(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, request: _Request, scope: Scope) -> Answer:
        """Return the answer of the request that runs, ran, or begins now. Raises ServiceFault."""
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
        before = await answers.in_thread(_find_or_begin, request)
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
            await answers.in_thread(_try, answers.complete, request.identity, *kept)
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
    """Whether a request with such an answer can be run as if for the first time."""
    return status is not None and (400 <= status < 500 or status in _NOT_KEPT)


def _find_or_begin(request: _Request) -> Answer | None:
    """Return the earlier answer of the same request; without one, note that it begins."""
    before = _find(request)
    if before is None:
        _try(request.answers.begin, request.identity)
    return before


def _find(request: _Request) -> Answer | None:
    try:
        return request.answers.find(request.key)
    except sqlite3.Error as error:
        logger.error("Kept answers cannot be read: %s", error)
        return None


def _try(action: Any, *arguments: Any) -> None:
    """Log a failure to store an answer: a full disk must not keep a request from running."""
    try:
        action(*arguments)
    except sqlite3.Error as error:
        logger.error("An answer cannot be kept: %s", error)


def _check_same(body_hash: bytes, request: _Request) -> None:
    if body_hash != request.body_hash:
        raise Unprocessable("This Idempotency-Key was used with another body")


def _idempotency_key(scope: Scope) -> bytes:
    """Return the key of a request that may be sent again; empty for all others."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith("/stream"):
        return b""
    return next((value for name, value in scope["headers"] if name == b"idempotency-key"), b"")


def _key_of(scope: Scope, given: bytes) -> bytes:
    """Identify a request, without its body."""
    query = scope.get("query_string", b"")
    user = _user(_user_header(scope))
    return _digest(_caller(scope), scope["path"].encode(), query, given, user)


def _owner_of(scope: Scope) -> bytes:
    """Identify the owner of an answer: the key, and the user it acts for."""
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
    """Decode the user, so that one user is one owner however the letters are encoded."""
    try:
        return user_in(named).encode()
    except BadRequest:  # no user, or an impossible one, is refused by the route
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
