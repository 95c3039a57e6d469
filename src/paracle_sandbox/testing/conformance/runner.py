"""Runs checks: all of them in tests, the quick ones on a user's machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ...backends.base import Backend, Health
from ...config import SandboxConfig
from ...errors import SandboxError
from . import (
    commands,
    files,
    isolation,
    lifecycle,
    limits,
    managers,
    python_programs,
    stopping,
    streams,
    terminals,
    transfers,
)
from .case import Case
from .expect import CheckFailed
from .registry import FEATURES, Check

Report = Callable[[str, bool, str], None]

CHECK_SECONDS = 240.0

_THEMES = (lifecycle, commands, stopping, python_programs, streams, files, transfers, terminals,
           limits, isolation, managers)  # fmt: skip
# The layer of Health that has to be in force for a feature. No layer implies the other features:
# the test module of a backend states them.
_LAYERS = {
    "root": "read-only system",
    "identity": "own user",
    "processes": "pid namespace",
    "network": "no network",
    "memory": "memory limit",
    "cpu": "cpu limit",
    "pids": "process limit",
    "disk_apart": "disk limit apart from memory",
}


def all_checks() -> list[Check]:
    """Return every check, by theme, in the order in which they are written."""
    return [
        value for theme in _THEMES for value in vars(theme).values() if isinstance(value, Check)
    ]


def features_of(health: Health) -> frozenset[str]:
    """Return the features that a backend reports on this machine, as far as layers imply them."""
    in_force = {layer.name for layer in health.layers if layer.in_force}
    return frozenset(feature for feature, layer in _LAYERS.items() if layer in in_force)


async def run_check(
    check: Check,
    backend: Backend,
    features: frozenset[str] = frozenset(FEATURES),
    config: SandboxConfig | None = None,
) -> None:
    """Run one check, and verify that it left nothing behind. Raises CheckFailed, or the error that
    broke it."""
    if missing := check.missing(features):
        raise ValueError(f"{check.name} needs {', '.join(missing)}")
    before = await _list_own_sandboxes(backend)
    with tempfile.TemporaryDirectory(prefix="paracle-check-") as directory:
        case = Case(backend, features, Path(directory), config)
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await check.body(case)
        finally:
            await case.close()
    left = await _list_own_sandboxes(backend, case.made) - before
    if left:
        raise CheckFailed(f"still listed afterwards: {', '.join(sorted(left))}")


async def run_quick(
    backend: Backend,
    report: Report,
    config: SandboxConfig | None = None,
    features: frozenset[str] | None = None,
) -> bool:
    """Run the quick checks, pass name, outcome and detail of each to ``report``, and return
    whether all passed.

    A feature that the backend lacks here is reported, but is not a failure: health shows what it
    takes to have it.
    """
    if features is None:
        health = await backend.health()
        report("health", health.available, f"{health.detail} {health.remedy}".strip())
        if not health.available:
            return False
        features = features_of(health)
    outcomes = [
        await _run_reported(check, backend, report, config, features)
        for check in all_checks()
        if check.quick
    ]
    return all(outcomes)


async def _run_reported(
    check: Check,
    backend: Backend,
    report: Report,
    config: SandboxConfig | None,
    features: frozenset[str],
) -> bool:
    if missing := check.missing(features):
        report(check.name, True, f"left out: not available here: {', '.join(missing)}")
        return True
    try:
        await run_check(check, backend, features, config)
    except (CheckFailed, SandboxError, OSError) as error:
        report(check.name, False, f"{check.description} {type(error).__name__}: {error}")
        return False
    report(check.name, True, check.description)
    return True


async def _list_own_sandboxes(backend: Backend, made: list[str] | None = None) -> set[str]:
    """Return the ids of sandboxes of this process. Other processes have sandboxes of their own."""
    return {
        info.sandbox_id
        for info in await backend.list_sandboxes()
        if info.owner_pid == os.getpid() or info.sandbox_id in (made or ())
    }
