"""Limits on what is kept for clients that do not read their answers: how long, and how much.

Connections with unsent bytes are looked at each second. A client that took too little in a minute
is cut off, whether its request is still answered or long done. While more is kept than there is
room for, the largest connection of the key, or of the key with most, is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .budget import Budget

if TYPE_CHECKING:
    from .transport import CountingTransport


@dataclass(frozen=True)
class Patience:
    """How long the service waits for a client, and how much memory all clients have."""

    header_seconds: float = 15.0
    stall_seconds: float = 60.0
    # A client has to take so many bytes, or all there are, in stall_seconds.
    stall_bytes: int = 64 << 10
    look_seconds: float = 1.0
    unsent_bytes: int = 256 << 20
    unsent_bytes_per_key: int = 64 << 20
    unread_bytes: int = 256 << 20
    unread_bytes_per_key: int = 64 << 20
    # Beyond it, a new connection takes the place of the one that is idle for longest.
    max_connections: int = 6000


@dataclass
class _Stalled:
    """A connection with unsent bytes: since when, and how much its client had taken by then."""

    since: float
    taken: int
    calls: list[Callable[[], None]] = field(default_factory=list)


class SlowClients:
    """Watches the connections of a server that have unsent bytes. ``on_cut`` is called for each
    that is cut off."""

    def __init__(self, patience: Patience, on_cut: Callable[[], None] = lambda: None) -> None:
        self.patience = patience
        # Bytes that clients have sent and the application has not read yet.
        self.unread = Budget(patience.unread_bytes_per_key, patience.unread_bytes)
        self._on_cut = on_cut
        self._unsent = Budget(patience.unsent_bytes_per_key, patience.unsent_bytes)
        self._watched: dict[CountingTransport, _Stalled] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def total(self) -> int:
        return self._unsent.total

    def watch(self, transport: CountingTransport, call: Callable[[], None] | None = None) -> None:
        """Watch a connection with unsent bytes. ``call`` is called once it has none, or is cut."""
        now = asyncio.get_running_loop().time()
        stalled = self._watched.get(transport)
        if stalled is None:
            stalled = self._watched[transport] = _Stalled(now, transport.taken)
        if call is not None:
            stalled.calls.append(call)
        if self._timer is None:
            self._look_later()
        self._account(transport)

    def forget(self, transport: CountingTransport) -> None:
        stalled = self._watched.pop(transport, None)
        self._unsent.set(transport, transport.key_id, 0)
        self.unread.set(transport, transport.key_id, 0)
        for call in stalled.calls if stalled is not None else ():
            call()

    def cut(self, transport: CountingTransport) -> None:
        """Close the connection at once; what is unsent is dropped."""
        self._on_cut()
        transport.abort()
        self.forget(transport)

    def oldest(self) -> CountingTransport | None:
        """Return the connection whose client has not read for longest."""
        found = self._watched
        return min(found, key=lambda one: found[one].since) if found else None

    def receive(self, transport: CountingTransport, amount: int) -> None:
        """Account for the bytes of this client that are kept now and not read yet."""
        self._keep_within(self.unread, transport, lambda: amount)

    def _account(self, transport: CountingTransport) -> None:
        self._keep_within(self._unsent, transport, lambda: transport.unsent)

    def _keep_within(
        self, budget: Budget, transport: CountingTransport, amount: Callable[[], int]
    ) -> None:
        """Set what a connection has of a budget, and cut off the largest ones until the budget is
        kept: those of this key if it has more than its share, else of the key with most."""
        key = transport.key_id
        while not budget.set(transport, key, amount()):
            victim = budget.largest(key if budget.is_over(key) else None)
            self.cut(victim)  # type: ignore[arg-type]
            if victim is transport:
                return

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.patience.look_seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for transport, stalled in list(self._watched.items()):
            if not transport.unsent:
                self._watched.pop(transport, None)
                self._unsent.set(transport, transport.key_id, 0)
                for call in stalled.calls:
                    call()
            elif transport.taken >= stalled.taken + self.patience.stall_bytes:
                stalled.since, stalled.taken = now, transport.taken
            elif now - stalled.since > self.patience.stall_seconds:
                self.cut(transport)
        for transport in list(self._watched):
            self._account(transport)
        if self._watched:
            self._look_later()
