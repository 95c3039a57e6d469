"""The instances of one server: made, changed, started, found and removed, by name.

``Maker`` makes them, stopped, each for the one sandbox that has its id.

    cold    made from the image under a name that only this id has ── renamed
    ready   made ahead of need, under a name that nobody knows     ── renamed

To be renamed is to take the id: of all that want one name the server renames one, and has touched
nothing of the others, because its record of the disk comes first and is unique. No instance is made
under the name of a sandbox itself: to make one and to rename another at once can refuse both, and
whoever tries to make one holds a lock of the name, for which the winner's start would be refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from ...config import SandboxConfig
from ...errors import BackendUnavailableError, SandboxConflictError, SandboxError
from .labels import SESSION, cold_name, instance_name
from .server import Refused, Server
from .spec import Place, instance_body, sandbox_change, state_change

logger = logging.getLogger(__name__)

_REMOVE_SECONDS = 60.0
_LINGER_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
# Ids of its own for each instance: a server may have too few. Words of its refusal.
_OPTIONAL, _NO_IDS = "security.idmap.isolated", ("idmap", "uid/gid")
_WAIT = re.compile(r"already running|is busy running", re.IGNORECASE)


class Instances:
    """The requests about instances, each by the name of one."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def make(self, body: Mapping[str, Any]) -> None:
        await self._server.change("POST", "/1.0/instances", body)

    async def change(self, name: str, body: Mapping[str, Any]) -> None:
        await self._server.change("PATCH", _path(name), body)

    async def rename(self, name: str, new_name: str) -> None:
        """Raises Refused, see ``is_taken``, when there is one of the new name."""
        await self._server.change("POST", _path(name), {"name": new_name})

    async def start(self, name: str) -> None:
        """Of one that was just made. That it runs already means that the keeper of an older one of
        the same name is not gone yet, as after a restart of the server; that it is busy, that
        somebody else wants something of it, and was or will be refused."""
        deadline = asyncio.get_running_loop().time() + _LINGER_SECONDS
        while True:
            try:
                await self._server.change("PUT", f"{_path(name)}/state", state_change("start"))
                return
            except Refused as refused:
                late = asyncio.get_running_loop().time() > deadline
                if late or not _WAIT.search(refused.message):
                    raise
            await asyncio.sleep(_LONGEST_PAUSE_SECONDS)

    async def stop(self, name: str) -> None:
        await self._server.change("PUT", f"{_path(name)}/state", state_change("stop"))

    async def find(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(await self._server.get(_path(name)))
        except Refused as refused:
            if refused.is_absence:
                return None
            raise

    async def state(self, name: str) -> dict[str, Any]:
        """Of its processes and memory. Raises Refused when it is gone."""
        return dict(await self._server.get(f"{_path(name)}/state"))

    async def all(self) -> list[dict[str, Any]]:
        """Raises BackendUnavailableError when the server does not tell, as of a project that is no
        longer there: then nothing of ours can be found here."""
        try:
            return list(await self._server.get("/1.0/instances?recursion=1"))
        except Refused as refused:
            raise BackendUnavailableError(
                f"The Incus server does not list its instances: {refused.message}. `incus list` "
                "says the same; `incus project switch default` leaves a project that is gone.",
                step="server",
            ) from refused

    async def remove(self, name: str) -> None:
        """Until it is not there: it may be on its way already, as one whose guest has ended is.
        Raises Refused when the server keeps it."""
        deadline = asyncio.get_running_loop().time() + _REMOVE_SECONDS
        pause = _PAUSE_SECONDS
        while (found := await self.find(name)) is not None:
            try:
                if str(found.get("status")).lower() == "stopped":
                    await self._server.change("DELETE", _path(name))
                else:
                    await self.stop(name)
            except Refused as refused:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                # Busy with its own end, or ended between the question and the order.
                if not refused.is_absence:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def remove_begun(self, name: str) -> None:
        """remove() of one that the server may still be making, for somebody who went away."""
        deadline = asyncio.get_running_loop().time() + _REMOVE_SECONDS
        while True:
            operations = await self._server.get("/1.0/operations?recursion=1")
            under_way = [operations.get(state) for state in ("pending", "running")]
            if _path(name) not in str(under_way):
                break
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(_LONGEST_PAUSE_SECONDS / 5)
        await self.remove(name)


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


def _path(name: str) -> str:
    return f"/1.0/instances/{quote(name)}"
