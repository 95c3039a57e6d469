"""Middleware: sets the client's address of a request that a proxy passed on.

Anybody can send X-Forwarded-For. It counts only when the connection comes from a proxy that the
operator has named (SANDBOX_TRUSTED_PROXIES), and only as far as proxies of that list wrote it:
each appends the address that it saw, so the client is the last one that is no such proxy. Text
that is no address is ignored, and never reaches the log.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

# A longer chain of proxies is an invention of the client.
MAX_PROXIES = 16
_MAX_ADDRESS = 64

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ForwardedFor:
    """Wraps the application, and sets the client's address and scheme of each request."""

    def __init__(self, app: ASGIApp, trusted_proxies: Sequence[str]) -> None:
        self._app = app
        self._trusted = [ipaddress.ip_network(one) for one in trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._trusted and scope["type"] in ("http", "websocket") and scope.get("client"):
            self._believe(scope)
        await self._app(scope, receive, send)

    def _believe(self, scope: Scope) -> None:
        peer = _address(scope["client"][0])
        if peer is None or not self._is_trusted(peer):
            return
        client = self._client(_values(scope, b"x-forwarded-for"), peer)
        scope["client"] = (str(client), 0 if client != peer else scope["client"][1])
        scheme = (_values(scope, b"x-forwarded-proto")[-1:] or [""])[0].lower()
        if scheme in ("http", "https"):
            web = scope["type"] == "http"
            scope["scheme"] = scheme if web else {"http": "ws", "https": "wss"}[scheme]

    def _client(self, given: list[str], peer: Address) -> Address:
        """Return the last address that is no proxy of ours, or the farthest that can be trusted."""
        client = peer
        for text in reversed(given[-MAX_PROXIES:]):
            address = _address(text)
            if address is None:
                break
            client = address
            if not self._is_trusted(address):
                break
        return client

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return the parts of a header, also where it was sent in several lines."""
    lines = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return [part.strip() for line in lines for part in line.split(",")]


def _address(text: str) -> Address | None:
    """Parse an address, also with a port, as some proxies write it."""
    if len(text) > _MAX_ADDRESS:
        return None
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if isinstance(mapped, ipaddress.IPv4Address) else address
