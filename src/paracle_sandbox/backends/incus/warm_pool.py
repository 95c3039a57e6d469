"""Instances kept ready: made from an image and never started, so that create need not unpack it.

Each is used once, and then another is made, off the critical path. The ready instances of a dead
owner are swept like sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ...errors import SandboxError
from .labels import WARM, warm_name
from .server import Refused

logger = logging.getLogger(__name__)

# Makes a stopped instance of an image: its name, its extra keys, its source.
Make = Callable[[str, dict[str, str], Mapping[str, Any]], Awaitable[None]]
Remove = Callable[[str], Awaitable[None]]


class WarmPool:
    """The ready instances of one backend, by image."""

    def __init__(self, size: int, make: Make, remove: Remove) -> None:
        self._size = size
        self._make = make
        self._remove = remove
        self._ready: defaultdict[str, list[str]] = defaultdict(list)
        self._making: set[asyncio.Task[None]] = set()
        self._wanted: defaultdict[str, int] = defaultdict(int)
        # Whatever may be on the server, also half made: what is left if nobody closes this.
        self.names: set[str] = set()

    def take(self, source: Mapping[str, Any]) -> str | None:
        """Return the name of a ready instance, which belongs to the caller from now on."""
        ready = self._ready[_key(source)]
        if not ready:
            return None
        name = ready.pop()
        self.names.discard(name)
        return name

    def refill(self, source: Mapping[str, Any]) -> None:
        """Have as many ready instances as there should be, some time later."""
        key = _key(source)
        while len(self._ready[key]) + self._wanted[key] < self._size:
            self._wanted[key] += 1
            task = asyncio.get_running_loop().create_task(self._add(key, dict(source)))
            self._making.add(task)
            task.add_done_callback(self._making.discard)

    async def settle(self) -> None:
        """Wait until no instance is being made any more."""
        while self._making:
            await asyncio.wait(list(self._making))

    async def close(self) -> None:
        # What the server has begun it finishes: only then is there something to remove.
        await self.settle()
        for names in self._ready.values():
            while names:
                name = names.pop()
                try:
                    await self._remove(name)
                    self.names.discard(name)
                except (Refused, SandboxError) as error:
                    logger.warning("an instance that was kept ready stays: %s", error)

    async def _add(self, key: str, source: dict[str, Any]) -> None:
        token = secrets.token_hex(8)
        name = warm_name(token)
        self.names.add(name)
        try:
            await self._make(name, {WARM: token}, source)
            self._ready[key].append(name)
        except (Refused, SandboxError) as error:
            self.names.discard(name)
            # Whoever creates next meets the same, and is told.
            logger.info("no instance is kept ready: %s", error)
        finally:
            self._wanted[key] -= 1


def _key(source: Mapping[str, Any]) -> str:
    return json.dumps(dict(source), sort_keys=True)
