"""Slows down the guessing of keys: an address that sends many different wrong keys has to wait.

Only different keys count, because a client that repeats one wrong key is misconfigured and guesses
nothing. Keys that were right from an address before go on working there.
"""

from __future__ import annotations

import ipaddress
import time

from ..errors import TooMany

MAX_WRONG = 60
_MAX_ADDRESSES = 10_000
_MAX_RIGHT = 10_000
_MINUTE = 60.0


class WrongKeys:
    """Counts wrong keys of this minute by address. Keys are stored as Python's hash(), which is
    seeded for each process."""

    def __init__(self, max_wrong: int = MAX_WRONG) -> None:
        self._max_wrong = max_wrong
        self._since = 0.0
        self._wrong: dict[str, set[int]] = {}
        self._right: dict[int, None] = {}

    def check(self, address: str, key: str) -> None:
        """Raise TooMany for an address that guesses. Call it before the key is looked up."""
        if not self._wrong:
            return
        left = self._since + _MINUTE - time.monotonic()
        if left <= 0:
            self._wrong.clear()
            return
        tried = self._wrong.get(_network(address), ())
        if len(tried) >= self._max_wrong and hash((address, key)) not in self._right:
            raise TooMany("Too many wrong keys were sent from this address; wait", left)

    def was_right(self, address: str, key: str) -> None:
        mark = hash((address, key))
        if mark not in self._right:
            if len(self._right) >= _MAX_RIGHT:
                del self._right[next(iter(self._right))]
            self._right[mark] = None

    def was_wrong(self, address: str, key: str) -> None:
        if not self._wrong:
            self._since = time.monotonic()
        network = _network(address)
        if network not in self._wrong and len(self._wrong) >= _MAX_ADDRESSES:
            return
        tried = self._wrong.setdefault(network, set())
        if len(tried) < self._max_wrong:
            tried.add(hash(key))


def _network(address: str) -> str:
    """Return the address; of IPv6 the /64, all of which one sender is likely to have."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address, 64), strict=False))
    except ValueError:
        return address
