"""Makes instances, stopped, each for the one sandbox that has its id.

    cold    made from the image under a name that only this id has ── renamed
    ready   made ahead of need, under a name that nobody knows     ── renamed

To be renamed is to take the id: of all that want one name the server renames one, and has touched
nothing of the others, because its record of the disk comes first and is unique. No instance is made
under the name of a sandbox itself: to make one and to rename another at once can refuse both, and
whoever tries to make one holds a lock of the name, for which the winner's start would be refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...config import SandboxConfig
from ...errors import SandboxConflictError, SandboxError
from .instances import Instances
from .labels import SESSION, cold_name, instance_name
from .server import Refused
from .spec import Place, instance_body, sandbox_change

logger = logging.getLogger(__name__)

# Ids of its own for each instance: a server may have too few. Words of its refusal.
_OPTIONAL, _NO_IDS = "security.idmap.isolated", ("idmap", "uid/gid")


class Maker:
    """Remembers whether its server has ids enough for each instance to have its own."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._isolated_ids = True

    async def make(
        self,
        sandbox_id: str,
        place: Place,
        config: SandboxConfig,
        source: Mapping[str, Any],
        ready: str | None,
    ) -> None:
        """Uses up the ready one, if there is one. Leaves nothing when it fails.

        Raises SandboxConflictError when the id is taken."""
        own_name = ready or cold_name(sandbox_id)
        try:
            if ready is None or not await self._dress(ready, sandbox_change(config, place)):
                own_name = cold_name(sandbox_id)
                await self._make_cold(sandbox_id, instance_body(own_name, source, place, config))
            await self._take_id(sandbox_id, own_name)
        except BaseException:
            await self._discard(place.keys[SESSION], own_name, instance_name(sandbox_id))
            raise

    async def make_stopped(self, body: dict[str, Any]) -> None:
        """Without ids of its own, from then on, if the server has too few."""
        config = dict(body["config"])
        if not self._isolated_ids:
            config.pop(_OPTIONAL, None)
        try:
            await self._instances.make({**body, "config": config})
        except Refused as refused:
            text = refused.message.lower()
            if _OPTIONAL not in config or not any(words in text for words in _NO_IDS):
                raise
            logger.warning("Instances share their ids: %s", refused.message)
            self._isolated_ids = False
            await self.make_stopped(body)

    async def _dress(self, ready: str, change: Mapping[str, Any]) -> bool:
        """Whether it is still there: a user of the server may have removed it."""
        try:
            await self._instances.change(ready, change)
        except Refused as refused:
            if refused.is_absence and await self._instances.find(ready) is None:
                return False
            raise
        return True

    async def _make_cold(self, sandbox_id: str, body: dict[str, Any]) -> None:
        # Unpacking takes a second, so ask first; whoever is late is refused at once.
        if await self._instances.find(instance_name(sandbox_id)) is not None:
            raise _conflict(sandbox_id)
        try:
            await self.make_stopped(body)
        except Refused as refused:
            raise _conflict(sandbox_id) if refused.is_taken else refused from refused

    async def _take_id(self, sandbox_id: str, own_name: str) -> None:
        try:
            await self._instances.rename(own_name, instance_name(sandbox_id))
        except Refused as refused:
            raise _conflict(sandbox_id) if refused.is_taken else refused from refused

    async def _discard(self, session: str, *names: str) -> None:
        """Under whichever name it is. Another's of the same name is of another session."""
        for name in names:
            with suppress(Refused, SandboxError):  # why it was not made matters more
                found = await self._instances.find(name)
                if found is not None and found["config"].get(SESSION) == session:
                    await self._instances.remove(name)


def _conflict(sandbox_id: str) -> SandboxConflictError:
    return SandboxConflictError(f"Sandbox {sandbox_id} exists already", sandbox_id)
