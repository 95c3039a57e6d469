"""What the ways in may ask about the backends of this machine without naming one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BackendUnavailableError
from ..settings import Settings
from .base import Backend, Health
from .registry import BACKENDS, LATER, explain, get_backend

if TYPE_CHECKING:
    from .native.templates import Template as Template
    from .native.templates import Templates as Templates

# The fake backend's sandboxes live and die inside one process: no other can see them.
# Daytona's are not of this machine, and asking for them needs its SDK and a key.
_LISTED = tuple(name for name in BACKENDS if name not in ("fake", "daytona"))


@asynccontextmanager
async def opened(name: str | None, settings: Settings) -> AsyncIterator[Backend]:
    """A backend for the length of a block. Raises BackendUnavailableError."""
    backend = get_backend(name, settings)
    try:
        yield backend
    finally:
        await backend.close()


async def examine(name: str | None, settings: Settings) -> list[Health]:
    """The health of one backend, or of all that ``auto`` chooses from, in its order."""
    wanted = name or settings.mode
    if wanted == "auto":
        return await explain(settings)
    try:
        async with opened(wanted, settings) as backend:
            return [await backend.health()]
    except BackendUnavailableError as error:
        return [Health(wanted, False, error.message, LATER.get(wanted, ""))]


def listed_backends(name: str | None = None) -> tuple[str, ...]:
    """Those whose sandboxes can be seen from any process of this machine."""
    return (name,) if name else _LISTED


def sweep(settings: Settings) -> int:
    """Remove what dead processes left. Returns how many sandboxes that were."""
    from .native.records import RecordStore

    return RecordStore(Path(settings.state_dir)).sweep()


def templates(settings: Settings) -> Templates:
    """The templates of this user."""
    from .native.templates import Templates

    return Templates(settings)
