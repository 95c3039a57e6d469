"""Removing a sandbox to the end: in bounded time, and whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from .errors import SandboxCleanupError
from .sandbox import Sandbox

T = TypeVar("T")


async def stop_in_time(sandbox: Sandbox) -> None:
    """Stop it within its ``cleanup_timeout``, or raise SandboxCleanupError."""
    seconds = sandbox.config.cleanup_timeout
    try:
        async with asyncio.timeout(seconds):
            await sandbox.stop()
    except TimeoutError as error:
        raise SandboxCleanupError(
            f"Sandbox {sandbox.sandbox_id} was not removed within {seconds} s", sandbox.sandbox_id
        ) from error


async def finish(work: asyncio.Future[T]) -> T:
    """Its result, waited for to the end; a cancellation is passed on only then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()
