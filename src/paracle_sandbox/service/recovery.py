"""What kind of failure it was, whether trying again is safe, and whether something was lost.

Trying again is safe only where nothing can have happened yet: a sandbox that was never made, a
read that did not come back. A program that may have run half is never run again by us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import (
    BackendUnavailableError,
    ResourceLimitError,
    SandboxConflictError,
    SandboxCreationError,
    SandboxError,
    SandboxExecutionError,
    SandboxFileError,
    SandboxLimitError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

CREATE_ATTEMPTS = 3
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Failure:
    """``retryable``: the same request may succeed later and cannot do harm. ``state_lost``:
    processes and files in /tmp are gone."""

    kind: str
    retryable: bool = False
    state_lost: bool = False


# The first that fits: narrower ones stand first.
_KINDS: tuple[tuple[type[SandboxError], Failure], ...] = (
    (SandboxTimeoutError, Failure("timeout")),
    (ResourceLimitError, Failure("limit")),
    (SandboxLimitError, Failure("busy", retryable=True)),
    (SandboxNotFoundError, Failure("not_found")),
    (SandboxConflictError, Failure("conflict")),
    (BackendUnavailableError, Failure("engine_down", retryable=True)),
    (SandboxCreationError, Failure("creation", retryable=True)),
    (SandboxExecutionError, Failure("sandbox_lost", state_lost=True)),
    (SandboxFileError, Failure("file")),
)


# What these steps refuse is wrong with the configuration: it stays so.
_CONFIG_STEPS = (None, "volumes", "interpreter", "image")


def is_refused(error: SandboxError) -> bool:
    """Whether what was asked for cannot be had, now or later."""
    return type(error) is SandboxCreationError and error.step in _CONFIG_STEPS


def classify(error: SandboxError) -> Failure:
    if is_refused(error):
        return Failure("creation")
    return next((f for kind, f in _KINDS if isinstance(error, kind)), Failure("internal"))


async def made(create: Callable[[], Awaitable[T]]) -> T:
    """Make a sandbox, again when that failed for a reason that may pass."""
    for attempt in range(1, CREATE_ATTEMPTS):
        try:
            return await create()
        except SandboxCreationError as error:
            if not _may_pass(error):
                raise
            logger.warning("Attempt %d to make a sandbox failed, trying again: %s", attempt, error)
            await asyncio.sleep(_PAUSE_SECONDS * attempt)
    return await create()


def _may_pass(error: SandboxCreationError) -> bool:
    """A missing image or a machine without sandboxes stays so; a guest that died need not."""
    permanent = isinstance(error, BackendUnavailableError | SandboxConflictError)
    return not permanent and not is_refused(error)
