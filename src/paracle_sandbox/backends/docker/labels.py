"""What we write on a container, and what of it we believe when we read it back.

An image may carry labels too, ours among them. So a container is taken for one of ours only if
its name is the one that its label makes: names are given by whoever starts a container, and
cannot come from an image.

A container that is kept ready (``ready.py``) has no sandbox's id on it, because labels cannot be
changed. Once it is somebody's it has the name of a sandbox, and the id is read from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import SandboxConfig
from ..base import SandboxInfo
from ..machine import engine_labels
from ..machine.owner import Owner

_PREFIX = "paracle."
MANAGED = _PREFIX + "managed"
BACKEND = _PREFIX + "backend"
SESSION = _PREFIX + "session"
_ID = _PREFIX + "sandbox_id"
_READY = _PREFIX + "ready"
_OWNER = _PREFIX + "owner"
_NAME = "paracle-sandbox-"


def container_name(sandbox_id: str) -> str:
    return f"{_NAME}{sandbox_id}"


def ready_name(token: str) -> str:
    return f"paracle-ready-{token}"


@dataclass(frozen=True)
class Title:
    """What a container is to be known by: to its owner, to the engine, and on its labels."""

    handle: str
    name: str
    labels: Mapping[str, str]


def sandbox_title(sandbox_id: str) -> Title:
    return Title(sandbox_id, container_name(sandbox_id), {_ID: sandbox_id})


def ready_title(token: str) -> Title:
    """Its handle is the id of no sandbox."""
    return Title(f"ready {token}", ready_name(token), {_READY: token})


def labels_of(
    title: Title,
    backend: str,
    session: str,
    owner: Owner,
    config: SandboxConfig,
    labels: Mapping[str, str],
) -> dict[str, str]:
    return {
        **title.labels,
        MANAGED: "true",
        BACKEND: backend,
        SESSION: session,
        _OWNER: str(owner),
        **engine_labels.written(_PREFIX, config, labels),
    }


def owner_of(container: Mapping[str, Any]) -> Owner | None:
    """Whose a listed container is, a sandbox or a ready one; None when it is none of ours."""
    labels = container.get("Labels") or {}
    is_ready = f"/{ready_name(labels.get(_READY, ''))}" in (container.get("Names") or ())
    return Owner.parse(labels.get(_OWNER, "")) if is_ready or _sandbox_id(container) else None


def _sandbox_id(container: Mapping[str, Any]) -> str:
    """Empty when it is no sandbox of ours."""
    labels, names = container.get("Labels") or {}, container.get("Names") or ()
    if _READY in labels:
        prefix = f"/{_NAME}"
        return next((name[len(prefix) :] for name in names if name.startswith(prefix)), "")
    sandbox_id = str(labels.get(_ID, ""))
    return sandbox_id if f"/{container_name(sandbox_id)}" in names else ""


def sandbox_info(container: Mapping[str, Any]) -> SandboxInfo | None:
    """What a listed container says of itself; None when it is no sandbox of ours. One that was
    kept ready is as old as its container."""
    labels = container.get("Labels") or {}
    sandbox_id, owner = _sandbox_id(container), owner_of(container)
    if owner is None or not sandbox_id:
        return None
    state = str(container.get("State"))
    state = {"created": "creating"}.get(state, state)
    return engine_labels.read(_PREFIX, labels, sandbox_id, labels.get(BACKEND, ""), state, owner)
