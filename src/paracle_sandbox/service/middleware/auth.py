"""The outermost middleware: checks every request before the application sees it.

It checks the key (401 without one, on every path but /health and /ready), then how many requests
of this key are open, then the announced body. It counts the body while it arrives, which has to be
in time. Open requests and WebSockets of a key end when the key is revoked or expires. All of it is
plain ASGI, so that it holds for routes, wrong addresses, documentation and WebSockets alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from ..connections.budget import Budget
from ..connections.transport import CountingTransport
from ..errors import (
    RETRY_SECONDS,
    BadRequest,
    ServiceFault,
    TooLarge,
    TooMany,
    Unavailable,
    fault_body,
    is_refusal,
)
from ..journal import Journal
from ..keys import Caller, Doorman
from ..metrics import Metrics
from ..users.names import routed_path
from .body_limits import JsonScan, RefusedBodies, is_upload, limit_of
from .wrong_keys import WrongKeys

logger = logging.getLogger(__name__)

PUBLIC = ("/health", "/ready")
# How long the service waits for a body in all; each of so many bytes earns a second back.
BODY_SECONDS = 20.0
BODY_BYTES_PER_SECOND = 16 << 10
# Bodies in memory at one time.
BODY_BYTES_PER_KEY = 64 << 20
BODY_BYTES = 256 << 20
# How soon open requests of a key end after the key.
KEY_SECONDS = 1.0
_DENIALS_LOGGED = 10
_MINUTE = 60.0
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


class Unauthorised(ServiceFault):
    """There is no key, or a wrong one."""

    status = 401
    kind = "denied"
    hint = "Send one as X-API-Key, or as a Bearer token"


class TooSlow(ServiceFault):
    """The rest of the request did not come in time."""

    status = 408


class Gate:
    """Wraps the application, and refuses what fails a check."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        doorman: Doorman,
        journal: Journal,
        metrics: Metrics,
        max_open: int,
        max_upload: int,
        body_seconds: float = BODY_SECONDS,
        body_bytes_per_key: int = BODY_BYTES_PER_KEY,
        body_bytes: int = BODY_BYTES,
    ) -> None:
        self._app = app
        self._doorman = doorman
        self._journal = journal
        self._metrics = metrics
        self._max_open = max_open
        self._max_upload = max_upload
        self._body_seconds = body_seconds
        self._bodies = Budget(body_bytes_per_key, body_bytes)
        self._refused_bodies = RefusedBodies()
        self._open: Counter[str] = Counter()
        self._held = _Held(doorman)
        self._wrong_keys = WrongKeys()
        self._denials = _Denials(journal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        guarded = _Answer(send, scope, self._metrics, self._journal)
        try:
            await self._know_keys(scope)
            caller = self._admit(scope)
        except ServiceFault as fault:
            await refuse(scope, guarded, fault)
            return
        state = scope.setdefault("state", {})
        state["caller"] = caller
        key_id = caller.key_id if caller else ""
        connection: CountingTransport | None = state.get("connection")
        if connection is not None:
            connection.key_id = key_id
        self._open[key_id] += 1
        self._metrics.connections.inc()
        request = _Request(key_id, asyncio.current_task())
        if caller is not None:
            self._held.add(request)
        try:
            await self._app(scope, self._limit_body(scope, receive, request), guarded)
        except ServiceFault as fault:
            self._note(fault, key_id)
            await refuse(scope, guarded, fault)
        except WebSocketDisconnect:
            pass  # the client left while something was sent to it
        except asyncio.CancelledError:
            if request.is_revoked:
                await self._end_revoked(scope, guarded, connection)
                return
            # The service ends, and waits no longer for open requests.
            if scope["type"] == "http":
                stopping = Unavailable("The service is shutting down", RETRY_SECONDS)
                await refuse(scope, guarded, stopping)
            raise
        finally:
            self._metrics.connections.dec()
            self._held.discard(request)
            if request.body:
                self._bodies.set(request, key_id, 0)
                if guarded.status in _REFUSED_BODIES:
                    self._refused_bodies.add(key_id, request.body)
            # A request counts as open until its client has read the answer.
            if connection is None or not connection.unsent:
                self._leave(key_id)
            else:
                connection.call_when_sent(partial(self._leave, key_id))

    async def _know_keys(self, scope: Scope) -> None:
        """Read the keys again if they were changed and this path needs one. Raises ServiceFault."""
        if self._doorman.is_current or _is_public(scope):
            return
        try:
            await self._doorman.refresh()
        except sqlite3.Error as error:
            logger.error("The keys cannot be read: %s", error)
            raise Unavailable("The keys cannot be read now", RETRY_SECONDS) from error

    def _leave(self, key_id: str) -> None:
        self._open[key_id] -= 1
        if not self._open[key_id]:
            del self._open[key_id]

    async def _end_revoked(
        self, scope: Scope, send: _Answer, connection: CountingTransport | None
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        if not send.begun and not send.accepted:
            await refuse(scope, send, Unauthorised("The key was revoked, or has expired"))
        elif connection is not None:
            connection.abort()
            await connection.wait_lost()

    def _admit(self, scope: Scope) -> Caller | None:
        """Return the caller, or None on the public paths. Raises ServiceFault."""
        _check_framing(scope)
        if _is_public(scope):
            return None
        address, key = (scope.get("client") or ("unknown",))[0], _key_in(scope)
        caller = None
        if key is not None:
            self._wrong_keys.check(address, key)
            caller = self._doorman.find(key)
        if caller is None:
            if key is not None:
                self._wrong_keys.was_wrong(address, key)
            self._metrics.refusals.labels("denied_key").inc()
            self._denials.note(scope)
            raise Unauthorised("Invalid API key")
        assert key is not None
        self._wrong_keys.was_right(address, key)
        if self._open[caller.key_id] >= self._max_open:
            fault = TooMany(f"{self._max_open} requests of this key are open already", 1)
            self._note(fault, caller.key_id, "connections")
            raise fault
        try:
            scope["path"] = routed_path(scope)
            if scope["type"] == "http":
                self._check_announced(scope)
                self._refused_bodies.check(caller.key_id)
        except ServiceFault as fault:
            self._note(fault, caller.key_id)
            raise
        return caller

    def _note(self, fault: ServiceFault, key_id: str, reason: str | None = None) -> None:
        """Count and log a refusal that no route has noted."""
        if is_refusal(fault) and not fault.noted:
            self._metrics.refusals.labels(reason or fault.kind).inc()
            self._journal.record_refusal(reason or fault.kind, key=key_id, what=str(fault))

    def _check_announced(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise BadRequest("Compressed bodies are not taken; send it as it is")
        length = headers.get(b"content-length", b"0")
        limit = limit_of(scope, self._max_upload)
        if not length.isdigit() or int(length) > limit:
            raise TooLarge(f"The body is larger than {limit} bytes")

    def _limit_body(self, scope: Scope, receive: Receive, request: _Request) -> Receive:
        """Wrap ``receive`` with the limits of a body: size, content, time and memory."""
        if scope["type"] != "http":
            return receive
        room, done, upload = limit_of(scope, self._max_upload), False, is_upload(scope)
        scan = JsonScan()
        clock = asyncio.get_running_loop().time
        patience = self._body_seconds

        async def next_piece() -> Message:
            nonlocal room, done, patience
            begun = clock()
            try:
                async with asyncio.timeout(patience):
                    message = await receive()
            except TimeoutError:
                raise TooSlow("The rest of the body did not come in time") from None
            size = len(message.get("body", b""))
            done = not message.get("more_body", False)
            room -= size
            request.body += size
            # Only the time in which we wait for the client counts.
            earned = patience - (clock() - begun) + size / BODY_BYTES_PER_SECOND
            patience = min(earned, self._body_seconds)
            if room < 0:
                raise TooLarge("The body is larger than allowed here")
            return message

        async def receive_limited() -> Message:
            if done:
                return await receive()
            message = await next_piece()
            if upload or not message.get("body"):
                return message
            try:
                scan.feed(message["body"])
            except TooLarge:
                while not done:  # or the client would not read the answer
                    await next_piece()
                raise
            self._keep(request)
            return message

        return receive_limited

    def _keep(self, request: _Request) -> None:
        if self._bodies.set(request, request.key_id, request.body):
            return
        if self._bodies.is_over(request.key_id):
            raise TooMany("The bodies of this key's open requests take too much memory", 1)
        raise Unavailable("The bodies of all open requests take too much memory", RETRY_SECONDS)


def _is_public(scope: Scope) -> bool:
    is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    return is_read and scope["path"] in PUBLIC


_REFUSED_BODIES = (400, 413, 422)


@dataclass(eq=False)
class _Request:
    """An open request or WebSocket: its key, the task that serves it, the bytes of its body."""

    key_id: str
    task: asyncio.Task[Any] | None
    body: int = 0
    is_revoked: bool = False


class _Held:
    """The open requests of all keys, which are ended when their key is."""

    def __init__(self, doorman: Doorman) -> None:
        self._doorman = doorman
        self._requests: set[_Request] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    def add(self, request: _Request) -> None:
        self._requests.add(request)
        if self._timer is None:
            self._look_later()

    def discard(self, request: _Request) -> None:
        self._requests.discard(request)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(KEY_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        self._looking = asyncio.get_running_loop().create_task(self._end_some())

    async def _end_some(self) -> None:
        try:
            if not self._doorman.is_current:
                await self._doorman.refresh()
        except sqlite3.Error as error:
            logger.error("The keys cannot be read: %s", error)
        good: dict[str, bool] = {}
        for request in self._requests:
            if request.key_id not in good:
                good[request.key_id] = self._doorman.is_good(request.key_id)
            if not good[request.key_id] and not request.is_revoked and request.task is not None:
                request.is_revoked = True
                request.task.cancel()
        if self._requests and self._timer is None:
            self._look_later()


def _key_in(scope: Scope) -> str | None:
    """Return the key of a request, or None if it has none or several."""
    found = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found.append(value)
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    if len(set(found)) != 1 or not 0 < len(found[0]) <= 500:
        return None
    return bytes(found[0]).decode("latin-1")


def _check_framing(scope: Scope) -> None:
    """Refuse two lengths, of which we might take one and a proxy the other. Raises BadRequest."""
    names = {name for name, _ in scope["headers"]}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise BadRequest("A request has a Content-Length or a Transfer-Encoding, not both")


class _Answer:
    """Wraps ``send``: adds our headers, counts the answer, and holds it back until the log has its
    lines. Requests to the public paths have none."""

    def __init__(self, send: Send, scope: Scope, metrics: Metrics, journal: Journal) -> None:
        self._send = send
        self._metrics = metrics
        self._journal = journal
        self._is_public = _is_public(scope)
        self._method = scope.get("method", "WEBSOCKET")
        self.begun = self.accepted = False
        self.status = 0
        self.request_id = secrets.token_hex(8)

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.begun = True
            own = [*_HEADERS, (b"x-request-id", self.request_id.encode())]
            given = {name.lower() for name, _ in message.get("headers", [])}
            message["headers"] = [
                *message.get("headers", []), *((n, v) for n, v in own if n not in given),
            ]  # fmt: skip
            method = self._method if self._method in _METHODS else "other"
            self.status = message["status"]
            self._metrics.requests.labels(method, self.status).inc()
        elif message["type"] == "websocket.accept":
            self.accepted = True
        if not self._journal.is_written and not self._is_public and _is_due(message):
            await self._journal.written()
        await self._send(message)


def _is_due(message: Message) -> bool:
    """Whether it begins or ends an answer; the pieces in between need no line of the log."""
    if message["type"] == "http.response.body":
        return not message.get("more_body", False)
    return bool(message["type"] != "websocket.send")


_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "WEBSOCKET")


class _Denials:
    """Logs the first few wrong keys of an address each minute, and the rest as a number."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._since = time.monotonic()
        self._counts: Counter[str] = Counter()

    def note(self, scope: Scope) -> None:
        if time.monotonic() - self._since > _MINUTE:
            for address, count in self._counts.items():
                if count > _DENIALS_LOGGED:
                    self._journal.record("suspicious", reason="key_wrong_keys", address=address,
                                         count=count)  # fmt: skip
            self._since = time.monotonic()
            self._counts.clear()
        address = (scope.get("client") or ("unknown",))[0]
        self._counts[address] += 1
        if self._counts[address] <= _DENIALS_LOGGED:
            self._journal.record_refusal("denied_key", address=address, path=scope["path"][:200])
        elif self._counts[address] == _DENIALS_LOGGED + 1:
            self._journal.record("suspicious", reason="key_wrong_keys", address=address)


async def refuse(scope: Scope, send: _Answer, fault: ServiceFault) -> None:
    """Answer with a failure, unless an answer is already under way."""
    if send.begun or send.accepted:
        return
    body = json.dumps(fault_body(fault)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if fault.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(fault.retry_after))).encode()))
    if fault.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    await send({"type": f"{kind}.start", "status": fault.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
