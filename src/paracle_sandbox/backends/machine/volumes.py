"""Directories of the host that a sandbox is given: only what the operator allows, read-only.

Any caller may choose ``SandboxConfig.volumes``; the operator says with ``PARACLE_VOLUMES`` which
directories may be chosen at all. Links are resolved before the comparison, so a link inside an
allowed directory does not lead out of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...audit import security_events
from ...errors import SandboxCreationError


@dataclass(frozen=True)
class Volume:
    """A directory or file of the host, and where it appears inside."""

    source: str
    target: str
    read_only: bool


def allowed_volumes(wanted: Mapping[str, str], allowed: Sequence[str]) -> list[Volume]:
    """Return the volumes that were asked for. Raises SandboxCreationError for one that is not
    there, or that is not allowed."""
    return [_allowed(source, target, allowed) for source, target in wanted.items()]


def _allowed(source: str, target: str, allowed: Sequence[str]) -> Volume:
    real = os.path.realpath(source)
    roots = [os.path.realpath(root) for root in allowed]
    if not any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots):
        security_events.security_event("volume_refused", path=source)
        raise SandboxCreationError(
            f"The volume {source} is not allowed. The operator allows directories of the host "
            f"with PARACLE_VOLUMES, which has {', '.join(allowed) or 'none'}.",
            step="volumes",
        )
    if not os.path.exists(real):
        raise SandboxCreationError(f"The volume {source} is not there.", step="volumes")
    inside = target.removesuffix(":rw").removesuffix(":ro")
    return Volume(real, inside, not target.endswith(":rw"))


def refuse_volumes(wanted: Mapping[str, str], backend: str) -> None:
    """Refuse all volumes, for a backend that has none."""
    if wanted:
        raise SandboxCreationError(
            f"The {backend} backend has no volumes. Copy files in with copy_to(), or use Docker.",
            step="volumes",
        )
