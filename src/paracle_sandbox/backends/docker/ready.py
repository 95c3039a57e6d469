"""Containers kept ready: started, with a guest in them, and nobody's yet.

To start a container takes an engine a quarter of a second; to give another name to one that runs,
a few milliseconds. So when a sandbox goes that has been asked for twice, the next of its kind is
started ahead of need, off the critical path. Its kind is all that was asked for, limits and labels
included, so nothing about it has to be changed when somebody takes it. It has run nothing, is used
once, and ends like any sandbox: when it is removed, or when the connection of its owner ends.

A ready one only takes the room that a sandbox has left: all together there are never more than the
owner once had at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ...config import SandboxConfig
from ...errors import SandboxError

logger = logging.getLogger(__name__)

# Kinds that are remembered, of which the one that was not asked for longest is forgotten.
_KINDS = 8
_TWICE = 2


@dataclass(frozen=True)
class Wish:
    """What somebody wanted, but for the name."""

    config: SandboxConfig
    labels: Mapping[str, str]

    @property
    def can_wait(self) -> bool:
        """Whether one can be made before it is wanted. What is to be checked or done for each
        sandbox at its time, a folder of the host or a network, is not done ahead."""
        return not self.config.volumes and self.config.network_mode == "none"

    @property
    def kind(self) -> str:
        return json.dumps([self.config.model_dump_json(), dict(self.labels)], sort_keys=True)


# Makes one, and answers with its handle; removes one.
Make = Callable[[Wish], Awaitable[str]]
Remove = Callable[[str], Awaitable[None]]


class Stock:
    """The ready ones of one backend, by their handles."""

    def __init__(self, size: int, make: Make, remove: Remove) -> None:
        self._size = size
        self._make = make
        self._remove = remove
        self._kinds: dict[str, list[asyncio.Task[str | None]]] = {}
        self._asked: OrderedDict[str, int] = OrderedDict()  # how often, the latest last
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def take(self, wish: Wish) -> str | None:
        """One that is the caller's from now on. One that is on its way is waited for: a new one
        would come later."""
        self._forget_other_loops()
        ready = self._kinds.get(wish.kind)
        return await ready.pop(0) if ready else None

    def note(self, wish: Wish) -> None:
        """Somebody has asked for this."""
        if self._size and wish.can_wait:
            self._asked[wish.kind] = self._asked.pop(wish.kind, 0) + 1
            while len(self._asked) > _KINDS:
                self._let_go(self._kinds.pop(self._asked.popitem(last=False)[0], []))

    def refill(self, wish: Wish, room: int) -> None:
        """Have as many as there should be, some time later, if it was asked for twice and there
        is ``room`` for so many in all."""
        self._forget_other_loops()
        if self._asked.get(wish.kind, 0) < _TWICE:
            return
        ready = self._kinds.setdefault(wish.kind, [])
        while len(ready) < min(self._size, len(ready) + room - self._count()):
            ready.append(asyncio.get_running_loop().create_task(self._try(wish)))
        if not ready:
            self.shrink(room - 1)  # for the next time, others have stood there long enough

    def shrink(self, room: int) -> None:
        """Let some go, first of the kind that was not asked for longest."""
        for kind in self._asked:
            ready = self._kinds.get(kind, [])
            self._let_go([ready.pop() for _ in ready[: max(0, self._count() - room)]])

    def _count(self) -> int:
        return sum(map(len, self._kinds.values()))

    def _let_go(self, unwanted: list[asyncio.Task[str | None]]) -> None:
        if unwanted:
            task = asyncio.get_running_loop().create_task(self._drop(unwanted))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def settled(self) -> None:
        """When nothing is being made or removed any more."""
        making = [task for ready in self._kinds.values() for task in ready]
        await asyncio.gather(*making, *self._leaving, return_exceptions=True)

    async def close(self) -> None:
        self._forget_other_loops()
        while self._kinds:
            _, ready = self._kinds.popitem()
            await self._drop(ready)
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _try(self, wish: Wish) -> str | None:
        try:
            return await self._make(wish)
        except SandboxError as error:
            # Whoever creates next meets the same, and is told.
            logger.info("no container is kept ready: %s", error)
            return None

    async def _drop(self, ready: list[asyncio.Task[str | None]]) -> None:
        # What the engine has begun it finishes: only then is there something to remove.
        for handle in await asyncio.gather(*ready, return_exceptions=True):
            if not isinstance(handle, str):
                continue
            try:
                await self._remove(handle)
            except SandboxError as error:
                # Its connection ends with us, and so does it.
                logger.warning("a container that was kept ready stays: %s", error)

    def _forget_other_loops(self) -> None:
        """An engine may be used from one event loop after another; connections may not."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._kinds.clear()
            self._leaving.clear()
