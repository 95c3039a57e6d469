"""Transports of the MCP server: stdin and stdout for one client, or HTTP for many."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..config import SandboxConfig
from ..errors import SandboxError
from ..host.platforms import is_part_of_python
from ..manager import SandboxManager
from ..service.errors import TooLarge, TooMany
from ..service.keys import require_strength
from ..service.middleware.body_limits import JsonScan
from ..service.middleware.wrong_keys import WrongKeys
from .client_sandboxes import Client, ClientSandboxes
from .server import ONE_CLIENT, Calls, build_server

INSTALL = "pip install '.[mcp]', in a checkout of Paracle Sandbox"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
# How long a client whose stream broke may take to come back.
GONE_SECONDS = 10.0
_SESSION = b"mcp-session-id"
_CLIENT = "paracle_sandbox.client"  # in the scope of a request, set by the door
_MAX_SESSIONS = 1000
_MAX_BODY = 4 << 20
_BODY_SECONDS = 60.0
_CLOSE = (b"connection", b"close")
_MAX_CONNECTIONS = 2 * _MAX_SESSIONS
# A session without a request for so long is ended by the SDK.
_SESSION_SECONDS = 1800.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def require_sdk() -> None:
    try:
        import mcp.server.lowlevel  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        if is_part_of_python(error.name):
            raise
        raise SandboxError(
            f"The MCP server needs a package that is not installed ({error.name}): {INSTALL}"
        ) from None


@asynccontextmanager
async def _serving(
    backend: str | None,
    config: SandboxConfig,
    max_sandboxes: int,
    listening: socket.socket | None = None,
) -> AsyncIterator[tuple[ClientSandboxes, Calls]]:
    try:
        async with _sandboxes(backend, config, max_sandboxes) as found:
            yield found
    finally:
        if listening is not None:
            listening.close()


@asynccontextmanager
async def _sandboxes(
    backend: str | None, config: SandboxConfig, max_sandboxes: int
) -> AsyncIterator[tuple[ClientSandboxes, Calls]]:
    manager = SandboxManager(max_sandboxes, backend=backend, idle_timeout=None)
    sandboxes, calls = ClientSandboxes(manager, config), Calls()
    with suppress(SandboxError):  # the first call reports it
        manager.backend.begin_preparing(config.base_image)
    try:
        yield sandboxes, calls
    finally:
        await calls.finish()
        await sandboxes.close()


async def serve_stdio(
    backend: str | None,
    config: SandboxConfig,
    max_sandboxes: int,
    on_cancel: Callable[[], None] = lambda: None,
) -> None:
    """Serve until the client closes our stdin. ``on_cancel`` is called after all sandboxes are
    removed: the rest waits for the client, because a thread is reading its next line."""
    require_sdk()
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (incoming, outgoing):
        try:
            async with _serving(backend, config, max_sandboxes) as (sandboxes, calls):
                server = build_server(sandboxes, calls, lambda ctx: ONE_CLIENT)
                await server.run(incoming, outgoing, server.create_initialization_options())
        except asyncio.CancelledError:
            on_cancel()
            raise


async def serve_http(
    backend: str | None,
    config: SandboxConfig,
    max_sandboxes: int,
    *,
    host: str,
    port: int,
    key: str | None,
    trusted_proxies: Sequence[str],
    on_start: Callable[[str], None],
) -> None:
    """Serve until cancelled. Raises SandboxError when others could reach it without a key, or with
    one that can be guessed. A proxy may bring others to a local address, too: a key that is set
    has to be strong wherever we serve."""
    if sys.platform == "win32":
        raise SandboxError(
            "Serving MCP over HTTP needs Linux or macOS, and this is Windows. Serve one client "
            "over stdin and stdout instead: paracle mcp"
        )
    require_sdk()
    keys = (key or "").split()
    if host not in LOCAL_HOSTS and not keys:
        raise SandboxError(
            f"{host} can be reached from elsewhere: set PARACLE_MCP_KEY to a secret that clients "
            "have to send, or serve on 127.0.0.1."
        )
    for one in keys:
        require_strength("PARACLE_MCP_KEY", one)
    listening = _listening(host, port)
    import uvicorn

    from ..service.connections.http_protocol import http_options
    from ..service.connections.slow_clients import Patience, SlowClients
    from ..service.middleware.forwarded_for import ForwardedFor

    class Quiet(uvicorn.Server):
        """Leaves signals to the command line, which cancels us."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    async with _serving(backend, config, max_sandboxes, listening) as (sandboxes, calls):
        server = build_server(sandboxes, calls, client_of)
        sdk = server.streamable_http_app(
            host=host, max_sessions=_MAX_SESSIONS, session_idle_timeout=_SESSION_SECONDS
        )
        app = ForwardedFor(Door(sdk, sandboxes, keys), trusted_proxies)
        web = Quiet(
            uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="on",
                           timeout_graceful_shutdown=1, ws="none",
                           **http_options(SlowClients(Patience(max_connections=_MAX_CONNECTIONS))))
        )  # fmt: skip
        await _serve(web, on_start, host, listening)


def _listening(host: str, port: int) -> socket.socket:
    """Make the listening socket. Raises SandboxError with what to do when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise SandboxError(
            f"Cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}. "
            "Choose another with --port; 0 takes a free one."
        ) from error


async def _serve(
    web: Any, on_start: Callable[[str], None], host: str, listening: socket.socket
) -> None:
    serving = asyncio.create_task(web.serve(sockets=[listening]))
    try:
        while not web.started and not serving.done():
            await asyncio.wait([serving], timeout=0.02)
        if serving.done():
            await serving
            raise SandboxError(f"The MCP server on {host} ended while it started")
        port = web.servers[0].sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        on_start(f"http://{shown}:{port}/mcp")
        await asyncio.shield(serving)
    finally:
        web.should_exit = True
        await asyncio.wait([serving])


def client_of(ctx: Any) -> Client:
    """Return the client of a request, as the door has found it."""
    found = ctx.request.scope[_CLIENT]
    assert isinstance(found, Client)
    return found


class Door:
    """Checks the key, tells clients apart, and watches when the sessions' clients leave.

    A session is one that this server has opened: its id is read from our own answer to the request
    that opened it. An id that a request names is looked up there, and counts only with the same
    key; any other is no session, whatever it looks like.

    A client that goes properly says so (DELETE). One that is killed closes the stream it listens
    on; it has some seconds to come back. One that never listened is given the long time.
    """

    def __init__(self, app: App, sandboxes: ClientSandboxes, keys: Sequence[str]) -> None:
        """``keys`` has one for each client to be told apart; without any, none is needed."""
        self._app = app
        self._sandboxes = sandboxes
        self._keys = {_name_of(key): b"Bearer " + key.encode() for key in keys}
        self._wrong_keys = WrongKeys()
        self._sessions: dict[str, _Session] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        address = (scope.get("client") or ("",))[0]
        try:
            key = self._key(address, headers.get(b"authorization", b""))
        except TooMany as fault:
            wait = str(max(1, round(fault.retry_after or 0))).encode()
            await _answer(send, 429, str(fault), (b"retry-after", wait))
            return
        if key is None:
            await _refuse(send)
            return
        if "connection" in scope.get("state", {}):
            scope["state"]["connection"].key_id = key  # whose share of memory it uses
        if scope["method"] == "POST":
            try:
                receive = await _whole_body(receive)
            except TooLarge as fault:
                await _answer(send, 413, str(fault), _CLOSE)
                return
            except TimeoutError:
                await _answer(send, 408, "The rest of the request did not come in time", _CLOSE)
                return
        name = headers.get(_SESSION, b"").decode("latin-1")
        session = self._sessions.get(name)
        if session is not None and session.key != key:
            await _answer(send, 404, "Session not found")
            return
        if session is None:
            scope[_CLIENT] = Client(key=key, address=address)
            await self._app(scope, receive, self._watching(send, key) if not name else send)
            return
        scope[_CLIENT] = Client(session=name, key=key)
        await self._serve_session(scope, receive, send, session)

    async def _serve_session(
        self, scope: Scope, receive: Receive, send: Send, session: _Session
    ) -> None:
        """Pass on a request of a session, and note whether the session has ended."""
        session.requests += 1
        self._sandboxes.stay(session.name)
        session.listened |= scope["method"] == "GET"

        async def send_watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                deleted = scope["method"] == "DELETE" and message["status"] < 300
                session.ended |= deleted or message["status"] == 404
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        finally:
            await self._left(session)

    def _watching(self, send: Send, key: str) -> Send:
        """Wrap ``send`` to note the session that the answer to this request opens."""

        async def send_watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] < 300:
                opened = dict(message.get("headers", [])).get(_SESSION, b"").decode("latin-1")
                if opened:
                    self._forget_old_sessions()
                    self._sessions[opened] = _Session(opened, key)
            await send(message)

        return send_watched

    def _forget_old_sessions(self) -> None:
        """Forget sessions that the SDK has ended because they were quiet for long."""
        long_ago = time.monotonic() - _SESSION_SECONDS - 60
        for session in list(self._sessions.values()):
            if not session.requests and session.used < long_ago:
                del self._sessions[session.name]

    async def _left(self, session: _Session) -> None:
        session.requests -= 1
        session.used = time.monotonic()
        if session.ended:
            self._sessions.pop(session.name, None)
            await asyncio.shield(self._sandboxes.end(session.name))
        elif session.requests == 0:
            self._sandboxes.end_later(session.name, GONE_SECONDS if session.listened else None)

    def _key(self, address: str, header: bytes) -> str | None:
        """Return the name of the key in a request, or None for a wrong one. Raises TooMany for an
        address that guesses."""
        if not self._keys:
            return ""
        if not header:
            return None
        sent = header.decode("latin-1")
        self._wrong_keys.check(address, sent)
        same = [name for name, key in self._keys.items() if hmac.compare_digest(header, key)]
        if not same:
            self._wrong_keys.was_wrong(address, sent)
            return None
        self._wrong_keys.was_right(address, sent)
        return same[0]


@dataclass
class _Session:
    """A session that this server has opened, and the key it was opened with."""

    name: str
    key: str
    requests: int = 0
    listened: bool = False
    ended: bool = False
    used: float = field(default_factory=time.monotonic)


def _name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def _whole_body(receive: Receive) -> Receive:
    """Read the body of a request, and return a ``receive`` that gives it again. Its content is
    counted before it is parsed. Raises TooLarge and TimeoutError."""
    scan, size = JsonScan(), 0
    messages: list[MutableMapping[str, Any]] = []
    async with asyncio.timeout(_BODY_SECONDS):
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
            piece = messages[-1].get("body", b"")
            size += len(piece)
            if size > _MAX_BODY:
                raise TooLarge(f"The body is larger than {_MAX_BODY} bytes")
            scan.feed(piece)
    messages.reverse()

    async def again() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return again


async def _refuse(send: Send) -> None:
    text = "Send the key: Authorization: Bearer KEY"
    await _answer(send, 401, text, (b"www-authenticate", b"Bearer"))


async def _answer(send: Send, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    head = [(b"content-type", b"text/plain"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
