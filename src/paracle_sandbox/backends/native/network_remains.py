"""Remove what sandboxes leave of their networks. Most have none, and do not pay for the imports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .table_mark import may_be_there

if TYPE_CHECKING:
    from .veth import Link


async def take(ended: Iterable[Link | None]) -> None:
    """Remove links that would go with the namespaces, a little later, and at last the rules."""
    links = [link for link in ended if link is not None]
    if links:
        from . import network

        await network.detach(*links)


async def sweep() -> None:
    """The rules that a killed owner left. Records do not tell of them: its spawner may have removed
    those. Raises SandboxCleanupError."""
    if may_be_there():
        from . import network

        await network.sweep()
