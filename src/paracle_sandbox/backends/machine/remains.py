"""Slots that could not be removed with their sandboxes: remembered, and tried again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ...errors import SandboxCleanupError

logger = logging.getLogger(__name__)


class Remains:
    """Of one backend. Its ``remove`` is idempotent, and answers with what is left of a slot."""

    def __init__(self, remove: Callable[[str], Awaitable[str]]) -> None:
        self._remove = remove
        self._slots: dict[str, set[str]] = {}

    def add(self, sandbox_id: str, slot: str) -> None:
        """Nobody uses this slot any more. Several sandboxes may have had the same name."""
        self._slots.setdefault(sandbox_id, set()).add(slot)

    async def remove(self, sandbox_id: str) -> None:
        """All of this name. Raises SandboxCleanupError, and can then be asked again."""
        for slot in list(self._slots.get(sandbox_id, ())):
            if left := await self._remove(slot):
                raise SandboxCleanupError(f"Sandbox {sandbox_id} left files: {left}", sandbox_id)
            self._forget(sandbox_id, slot)

    def _forget(self, sandbox_id: str, slot: str) -> None:
        slots = self._slots.get(sandbox_id, set())
        slots.discard(slot)
        if not slots:
            self._slots.pop(sandbox_id, None)

    async def try_to_remove(self, *sandbox_ids: str) -> None:
        """Those, or all; what is still left is tried again by the next who asks."""
        for sandbox_id in sandbox_ids or list(self._slots):
            try:
                await self.remove(sandbox_id)
            except SandboxCleanupError as error:
                logger.warning("%s", error)
