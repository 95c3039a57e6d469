"""The seam: what a kind of isolation must do, and nothing more.

A backend makes the isolated place and removes it. What happens inside (programs, files,
terminals) is the guest's work, and is the same everywhere.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..channel.base import Channel
from .machine.drafts import Drafts
from .values import Health, Layer, SandboxInfo, Usage

if TYPE_CHECKING:
    from ..config import SandboxConfig

__all__ = ["Backend", "Channel", "Health", "Layer", "SandboxInfo", "Usage"]


class Backend(ABC):
    """A kind of isolation. It keeps no record of its sandboxes: the id is the handle."""

    name: str
    # Whether destroy() kills the guest at once. Then it need not hear before that it has to end; it
    # does after, also if destroy() failed.
    kills_guests = False
    # Whether usage() does not count the CPU time that making a sandbox took.
    counts_from_handover = False
    # What is being copied to this machine's disk; sweep() removes those of dead processes.
    drafts = Drafts()
    # Told each step of what takes long, while somebody waits for it; "" when that is over.
    on_progress: Callable[[str], None] | None = None
    _swept = False

    @abstractmethod
    async def health(self) -> Health:
        """Prove each primitive by using it. Never raises."""

    @abstractmethod
    async def create(
        self, sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
    ) -> None:
        """Make the place. Returns when connect() would work; raises SandboxCreationError when it
        cannot, SandboxConflictError when the id is taken. Failed or cancelled, it leaves nothing
        behind."""

    @abstractmethod
    async def connect(self, sandbox_id: str) -> Channel:
        """A byte stream to the guest inside. Raises SandboxNotFoundError."""

    @abstractmethod
    async def usage(self, sandbox_id: str) -> Usage:
        """What it uses now. Raises SandboxNotFoundError when it is gone."""

    async def exact_usage(self, sandbox_id: str) -> Usage:
        """As usage(), where that still counts files which were removed a moment ago: without
        them. May take longer."""
        return await self.usage(sandbox_id)

    @abstractmethod
    async def destroy(self, sandbox_id: str) -> None:
        """Remove it with everything in it. Idempotent: gone is success. Raises
        SandboxCleanupError when something stays."""

    @abstractmethod
    async def list_sandboxes(self) -> list[SandboxInfo]:
        """Those of every process on this machine."""

    def lacking(self) -> list[str]:
        """The layers that its sandboxes do without on this machine, by their names in ``health``.
        Known from the first sandbox on, and at no cost."""
        return []

    async def sweep(self) -> int:
        """Remove what dead processes left, and nothing of a living one. Returns how many
        sandboxes that were."""
        await self.sweep_drafts()
        return 0

    async def sweep_drafts(self) -> None:
        if self.drafts.has_notes:  # to start a thread takes longer than to look
            await asyncio.to_thread(self.drafts.sweep)

    async def sweep_once(self) -> None:
        """For the first of a process; the next one tries again if that failed."""
        if not self._swept:
            self._swept = True
            try:
                await self.sweep()
            except BaseException:
                self._swept = False
                raise

    def begin_preparing(self, image: str) -> None:  # noqa: B027  most need nothing
        """Start, beside whatever comes next, what takes long and the first sandbox of this image
        will need. Never raises SandboxError: that sandbox reports what is wrong."""

    async def wait_for_packages(self, sandbox_id: str, source: str | bytes) -> None:  # noqa: B027
        """Before a program runs whose text is known: wait for packages that it imports, if they are
        still being installed."""

    async def close(self) -> None:  # noqa: B027  many hold nothing
        """Let go of what this process holds (helpers, pools); its sandboxes go with it."""
