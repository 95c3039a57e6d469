"""The instances of one server: made, changed, started, found and removed, by name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ...errors import BackendUnavailableError
from .server import Refused, Server
from .spec import state_change

_REMOVE_SECONDS = 60.0
_LINGER_SECONDS = 30.0
_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_WAIT = re.compile(r"already running|is busy running", re.IGNORECASE)


class Instances:
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


def _path(name: str) -> str:
    return f"/1.0/instances/{quote(name)}"
