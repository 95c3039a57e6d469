"""What we write on a container, and what of it we believe when we read it back.

An image may carry labels too, ours among them. So a container is taken for one of ours only if
its name is the one that its label makes: names are given by whoever starts a container, and
cannot come from an image.

A container that is kept ready (``ready.py``) has no sandbox's id on it, because labels cannot be
changed. Once it is somebody's it has the name of a sandbox, and the id is read from that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import SandboxConfig
from ...owner import Owner
from ..base import SandboxInfo

MANAGED = "paracle.managed"
BACKEND = "paracle.backend"
SESSION = "paracle.session"
_ID = "paracle.sandbox_id"
_READY = "paracle.ready"
_OWNER = "paracle.owner"
_CREATED = "paracle.created_at"
_CONFIG = "paracle.config"
_LABELS = "paracle.labels"
_NAME = "paracle-sandbox-"
_SHOWN = {"cpu_cores", "memory_mb", "disk_mb", "network_mode", "base_image"}


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
        _CREATED: f"{time.time():.3f}",
        _CONFIG: json.dumps(config.model_dump(mode="json", include=_SHOWN)),
        _LABELS: json.dumps(dict(labels)),
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
    alive = owner.is_alive
    state = str(container.get("State"))
    return SandboxInfo(
        sandbox_id=sandbox_id,
        backend=labels.get(BACKEND, ""),
        state={"created": "creating"}.get(state, state) if alive else "lost",
        owner_pid=owner.pid,
        owner_alive=alive,
        created_at=_number(labels.get(_CREATED)),
        config=_object(labels.get(_CONFIG)),
        labels=_object(labels.get(_LABELS)),
    )


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
