"""A budget of bytes: so many for one API key, so many in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Budget:
    """Counts the bytes that each holder keeps in memory, by the key that it belongs to."""

    def __init__(self, per_key: int, total: int) -> None:
        self._per_key = per_key
        self._limit = total
        self._held: dict[Hashable, tuple[str, int]] = {}
        self._by_key: Counter[str] = Counter()
        self.total = 0

    def set(self, holder: Hashable, key: str, amount: int) -> bool:
        """Set what a holder has now. Returns whether its key and the total are within limits."""
        old_key, old = self._held.pop(holder, (key, 0))
        self._by_key[old_key] -= old
        if not self._by_key[old_key]:
            del self._by_key[old_key]
        self.total += amount - old
        if amount:
            self._held[holder] = (key, amount)
            self._by_key[key] += amount
        return self._by_key[key] <= self._per_key and self.total <= self._limit

    def of(self, key: str) -> int:
        return self._by_key[key]

    def is_over(self, key: str) -> bool:
        """Whether this key has more than its share. A total above the limit is not looked at."""
        return self._by_key[key] > self._per_key

    def largest(self, key: str | None = None) -> Hashable:
        """Return the largest holder of a key; without one, of the key that has most."""
        if key is None:
            key = max(self._by_key, key=self._by_key.__getitem__)
        mine = (holder for holder, (of, _) in self._held.items() if of == key)
        return max(mine, key=lambda holder: self._held[holder][1])
