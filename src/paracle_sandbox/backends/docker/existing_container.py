"""A guest in a container that somebody else started: a further program of it, attached.

As a backend, so that everything above works in it. It isolates nothing: what the container is,
is its owner's doing, and it stays when the guest goes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...channel.bootstrap import BOOTSTRAP, boot_message
from ...config import SandboxConfig
from ...errors import SandboxCreationError, SandboxError, SandboxNotFoundError
from ...settings import Settings
from ..base import Backend, Channel, Health, SandboxInfo, Usage
from ..machine.drafts import Drafts
from .attach_channel import AttachChannel
from .engine import Engine
from .spec import guest_setup

_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}\Z")
_BODY = {
    "AttachStdin": True,
    "AttachStdout": True,
    "AttachStderr": True,
    "Tty": False,
    "Cmd": ["python3", "-I", "-c", BOOTSTRAP, "0,1"],
}


class InsideBackend(Backend):
    """One container, which can hold any number of guests."""

    name = "inside"

    def __init__(self, container: str, settings: Settings) -> None:
        if not _REFERENCE.match(container):
            raise SandboxCreationError(f"Not a container: {container[:80]!r}")
        self._container = container
        self._engine = Engine(settings)
        self.drafts = Drafts(settings.state_dir)
        self._channels: dict[str, AttachChannel] = {}

    async def health(self) -> Health:
        return Health(self.name, available=True, detail="what the container is")

    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        try:
            channel = await self._engine.execute(self._container, _BODY)
            # Whether the container has any other directory is not known.
            await channel.send(boot_message({**guest_setup(config), "working_dir": "/"}))
        except (SandboxError, ConnectionError) as error:
            await self.close()
            raise SandboxCreationError(
                f"No guest in the container {self._container}: {error}", sandbox_id, step="guest"
            ) from error
        self._channels[sandbox_id] = channel

    async def connect(self, sandbox_id: str) -> Channel:
        channel = self._channels.get(sandbox_id)
        if channel is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found", sandbox_id)
        return channel

    async def usage(self, sandbox_id: str) -> Usage:
        return Usage()  # the container's figures are not the guest's

    async def destroy(self, sandbox_id: str) -> None:
        channel = self._channels.pop(sandbox_id, None)
        if channel is not None:
            await channel.close()
        if not self._channels:
            await self._engine.close()

    async def list_sandboxes(self) -> list[SandboxInfo]:
        return []

    async def close(self) -> None:
        for sandbox_id in list(self._channels):
            await self.destroy(sandbox_id)
        await self._engine.close()
