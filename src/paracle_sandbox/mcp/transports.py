"""Where clients come from: stdin and stdout of one of them, or HTTP for many."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from ..config import SandboxConfig
from ..errors import SandboxError
from ..manager import SandboxManager
from .places import Places
from .server import ONE_CLIENT, Calls, build_server

INSTALL = "pip install 'paracle-sandbox[mcp]'"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
# A client whose stream broke may come back; one that was killed does not.
GONE_SECONDS = 10.0
_SESSION = b"mcp-session-id"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def require_sdk() -> None:
    try:
        import mcp.server.lowlevel  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SandboxError(
            f"The MCP server needs a package that is not installed ({error.name}): {INSTALL}"
        ) from None


@asynccontextmanager
async def _opened(
    backend: str | None, config: SandboxConfig, max_sandboxes: int
) -> AsyncIterator[tuple[Places, Calls]]:
    manager = SandboxManager(max_sandboxes, backend=backend, idle_timeout=None)
    places, calls = Places(manager, config), Calls()
    try:
        yield places, calls
    finally:
        await calls.finish()
        await places.close()


async def serve_stdio(backend: str | None, config: SandboxConfig, max_sandboxes: int) -> None:
    """Until the client closes our stdin."""
    require_sdk()
    from mcp.server.stdio import stdio_server

    async with _opened(backend, config, max_sandboxes) as (places, calls):
        server = build_server(places, calls, lambda ctx: ONE_CLIENT)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())


async def serve_http(
    backend: str | None,
    config: SandboxConfig,
    max_sandboxes: int,
    *,
    host: str,
    port: int,
    key: str | None,
    on_start: Callable[[str], None],
) -> None:
    """Until cancelled. Raises SandboxError when others could reach it and no key protects it."""
    require_sdk()
    if host not in LOCAL_HOSTS and not key:
        raise SandboxError(
            f"{host} can be reached from elsewhere: set PARACLE_MCP_KEY to a secret that clients "
            "have to send, or serve on 127.0.0.1."
        )
    import uvicorn

    class Quiet(uvicorn.Server):
        """Leaves the signals to the command line, which cancels us."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    async with _opened(backend, config, max_sandboxes) as (places, calls):
        server = build_server(places, calls, session_of)
        app = Door(server.streamable_http_app(host=host), places, key)
        web = Quiet(
            uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="on",
                           timeout_graceful_shutdown=1)
        )  # fmt: skip
        await _serve(web, on_start, host)


async def _serve(web: Any, on_start: Callable[[str], None], host: str) -> None:
    serving = asyncio.create_task(web.serve())
    try:
        while not web.started and not serving.done():
            await asyncio.wait([serving], timeout=0.02)
        if serving.done():
            await serving
            raise SandboxError(f"Cannot serve on {host}: is the port taken?")
        port = web.servers[0].sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        on_start(f"http://{shown}:{port}/mcp")
        await asyncio.shield(serving)
    finally:
        web.should_exit = True
        await asyncio.wait([serving])


def session_of(ctx: Any) -> str | None:
    """The session of a request; None for a client that has none."""
    request = ctx.request
    return None if request is None else request.headers.get("mcp-session-id")


class Door:
    """Checks the key, and watches when the sessions' clients leave.

    A client that goes properly says so (DELETE). One that is killed closes the stream it listens
    on; it has some seconds to come back. One that never listened is given the long time.
    """

    def __init__(self, app: App, places: Places, key: str | None) -> None:
        self._app = app
        self._places = places
        self._key = key
        self._open: Counter[str] = Counter()
        self._listened: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._key and not self._has_key(headers.get(b"authorization", b"")):
            await _refuse(send)
            return
        session = headers.get(_SESSION, b"").decode("latin-1")
        if not session:
            await self._app(scope, receive, send)
            return
        self._open[session] += 1
        self._places.stay(session)
        if scope["method"] == "GET":
            self._listened.add(session)
        try:
            await self._app(scope, receive, send)
        finally:
            await self._left(session, scope["method"])

    async def _left(self, session: str, method: str) -> None:
        self._open[session] -= 1
        if method == "DELETE":
            self._listened.discard(session)
            await asyncio.shield(self._places.end(session))
        if self._open[session] <= 0:
            del self._open[session]
            seconds = GONE_SECONDS if session in self._listened else None
            if not self._places.end_later(session, seconds):
                self._listened.discard(session)

    def _has_key(self, header: bytes) -> bool:
        assert self._key is not None
        return hmac.compare_digest(header, b"Bearer " + self._key.encode())


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b"Send the key: Authorization: Bearer KEY\n"})
