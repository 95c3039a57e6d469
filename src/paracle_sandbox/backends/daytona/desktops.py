"""The methods of DaytonaWorkspaces as functions, for programs that do not want to hold an object.

Key, address and image come from the settings. All calls of one event loop share a connection, which
the sandboxes that they return need as well: close_workspaces() ends it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .workspaces import DaytonaWorkspaces

# Whoever calls a function has nothing to keep the connection in, so it is kept here.
_open: dict[asyncio.AbstractEventLoop, DaytonaWorkspaces] = {}


async def create_sandbox(password: str | None = None, project_id: str | None = None) -> Any:
    """Create a sandbox and start its services. If no password is given, a random one is in its
    ``env``, as VNC_PASSWORD. Raises SandboxError."""
    return await _workspaces().create_sandbox(password, project_id)


async def get_or_start_sandbox(sandbox_id: str) -> Any:
    """Return the sandbox; if it was stopped or archived, start it first. Raises SandboxError."""
    return await _workspaces().get_or_start_sandbox(sandbox_id)


async def start_supervisord_session(sandbox: Any) -> None:
    """Start the services of a sandbox. Raises SandboxError."""
    await _workspaces().start_supervisord_session(sandbox)


async def delete_sandbox(sandbox_id: str) -> None:
    """Delete the sandbox. A sandbox that is gone is a success. Raises SandboxError."""
    await _workspaces().delete_sandbox(sandbox_id)


async def close_workspaces() -> None:
    """Close the connection; the sandboxes stay. Idempotent."""
    workspaces = _open.pop(asyncio.get_running_loop(), None)
    if workspaces is not None:
        await workspaces.close()


def _workspaces() -> DaytonaWorkspaces:
    loop = asyncio.get_running_loop()
    for ended in [known for known in _open if known.is_closed()]:
        del _open[ended]
    if loop not in _open:
        _open[loop] = DaytonaWorkspaces()
    return _open[loop]
