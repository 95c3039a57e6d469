"""What every request passes before anything of the application sees it.

In this order: who is it (401 for nobody, on every path but /health and /ready), how many
requests has this key open, is what it announces acceptable; then its body is counted while it
arrives, and a client that neither sends nor reads for long is let go. All of it is plain ASGI:
it holds for routes, wrong addresses, documentation and WebSockets alike.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .addresses import routed_path
from .faults import (
    RETRY_SECONDS,
    BadRequest,
    ServiceFault,
    TooLarge,
    TooMany,
    Unavailable,
    fault_body,
    is_refusal,
)
from .journal import Journal
from .keys import Caller, Doorman
from .metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC = ("/health", "/ready")
MAX_BODY = 8 << 20
BODY_SECONDS = 20.0
STALL_SECONDS = 60.0
_DENIALS_LOGGED = 10
_MINUTE = 60.0
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


class Unauthorised(ServiceFault):
    """No key, or one that opens nothing."""

    status = 401
    kind = "denied"
    hint = "Send one as X-API-Key, or as a Bearer token"


class Gate:
    """The outermost part of the application."""

    def __init__(
        self,
        app: App,
        *,
        doorman: Doorman,
        journal: Journal,
        metrics: Metrics,
        max_open: int,
        max_upload: int,
    ) -> None:
        self._app = app
        self._doorman = doorman
        self._journal = journal
        self._metrics = metrics
        self._max_open = max_open
        self._max_upload = max_upload
        self._open: Counter[str] = Counter()
        self._denials = _Denials(journal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        guarded = _Answer(send, scope, self._metrics)
        try:
            caller = self._admitted(scope)
        except ServiceFault as fault:
            await refuse(scope, guarded, fault)
            return
        scope.setdefault("state", {})["caller"] = caller
        key_id = caller.key_id if caller else ""
        self._open[key_id] += 1
        self._metrics.connections.inc()
        try:
            await self._app(scope, self._counted(scope, receive), guarded)
        except _LetGo:
            pass  # the client stopped sending or reading: the connection is closed
        except ServiceFault as fault:
            self._note(fault, key_id)
            await refuse(scope, guarded, fault)
        except asyncio.CancelledError:
            # The service ends, and waits no longer for what is still under way.
            if scope["type"] == "http":
                stopping = Unavailable("The service is shutting down", RETRY_SECONDS)
                await refuse(scope, guarded, stopping)
            raise
        finally:
            self._metrics.connections.dec()
            self._open[key_id] -= 1
            if not self._open[key_id]:
                del self._open[key_id]

    def _admitted(self, scope: Scope) -> Caller | None:
        """Who it is; None on the public paths. Raises ServiceFault."""
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if is_read and scope["path"] in PUBLIC:
            return None
        caller = self._caller(scope)
        if caller is None:
            self._metrics.refusals.labels("denied_key").inc()
            self._denials.note(scope)
            raise Unauthorised("Invalid API key")
        if self._open[caller.key_id] >= self._max_open:
            fault = TooMany(f"{self._max_open} requests of this key are open already", 1)
            self._note(fault, caller.key_id, "connections")
            raise fault
        try:
            scope["path"] = routed_path(scope)
            if scope["type"] == "http":
                self._check_announced(scope)
        except ServiceFault as fault:
            self._note(fault, caller.key_id)
            raise
        return caller

    def _note(self, fault: ServiceFault, key_id: str, reason: str | None = None) -> None:
        """What no route has seen, or did not answer."""
        if is_refusal(fault) and not fault.noted:
            self._metrics.refusals.labels(reason or fault.kind).inc()
            self._journal.refused(reason or fault.kind, key=key_id, what=str(fault))

    def _caller(self, scope: Scope) -> Caller | None:
        found = []
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                found.append(value)
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                found.append(value[7:].strip())
        if len(set(found)) != 1 or len(found[0]) > 500:
            return None
        return self._doorman.find(found[0].decode("latin-1"))

    def _check_announced(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise BadRequest("Compressed bodies are not taken; send it as it is")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._limit(scope):
            raise TooLarge(f"The body is larger than {self._limit(scope)} bytes")

    def _limit(self, scope: Scope) -> int:
        return self._max_upload if is_upload(scope) else MAX_BODY

    def _counted(self, scope: Scope, receive: Receive) -> Receive:
        if scope["type"] != "http":
            return receive
        room, done = self._limit(scope), False

        async def counted() -> Message:
            nonlocal room, done
            if done:
                return await receive()
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise _LetGo from None
            room -= len(message.get("body", b""))
            if room < 0:
                raise TooLarge("The body is larger than allowed here")
            done = not message.get("more_body", False)
            return message

        return counted


class _LetGo(Exception):
    """The client does not keep up."""


class _Answer:
    """The way back: our headers on every answer, and a limit on how long it may stall."""

    def __init__(self, send: Send, scope: Scope, metrics: Metrics) -> None:
        self._send = send
        self._metrics = metrics
        self._method = scope.get("method", "WEBSOCKET")
        self.begun = False
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
            self._metrics.requests.labels(method, message["status"]).inc()
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise _LetGo from None


_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "WEBSOCKET")


class _Denials:
    """Wrong keys in the log: the first few of an address each minute, the rest as a number."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._since = time.monotonic()
        self._counts: Counter[str] = Counter()

    def note(self, scope: Scope) -> None:
        if time.monotonic() - self._since > _MINUTE:
            for address, count in self._counts.items():
                if count > _DENIALS_LOGGED:
                    self._journal.record("suspicious", reason="key_guessing", address=address,
                                         count=count)  # fmt: skip
            self._since = time.monotonic()
            self._counts.clear()
        address = (scope.get("client") or ("unknown",))[0]
        self._counts[address] += 1
        if self._counts[address] <= _DENIALS_LOGGED:
            self._journal.refused("denied_key", address=address, path=scope["path"][:200])
        elif self._counts[address] == _DENIALS_LOGGED + 1:
            self._journal.record("suspicious", reason="key_guessing", address=address)


def is_upload(scope: Scope) -> bool:
    """Where a body is a file, taken piece by piece."""
    return bool(scope["method"] == "PUT" and scope["path"].endswith("/raw"))


async def refuse(scope: Scope, send: _Answer, fault: ServiceFault) -> None:
    """Answer with a failure, unless an answer is already under way."""
    if send.begun:
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
