"""What a manager says about itself and its sandboxes."""

from __future__ import annotations

from typing import TypedDict

from .errors import SandboxError
from .results import Stats
from .sandbox.sandbox import Sandbox


class Failure(TypedDict):
    """In place of the stats of a sandbox that could not be asked."""

    error: str


class ManagerStats(TypedDict):
    """What a manager holds; ``max_concurrent`` and ``max_sandboxes`` are one limit."""

    total_sandboxes: int
    max_concurrent: int
    max_sandboxes: int
    utilization: float
    active_operations: int
    idle_timeout: float | None
    cleanup_interval: float
    is_shutting_down: bool
    sandboxes: dict[str, Stats | Failure]


async def stats_of(sandbox: Sandbox) -> Stats | Failure:
    try:
        return await sandbox.get_stats()
    except SandboxError as error:
        return {"error": error.message}
