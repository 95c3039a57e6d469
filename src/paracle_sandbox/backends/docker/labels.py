"""What we write on a container, and what of it we believe when we read it back.

An image may carry labels too, ours among them. So a container is taken for one of ours only if
its name is the one that its label makes: names are given by whoever starts a container, and
cannot come from an image.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from ...config import SandboxConfig
from ...owner import Owner
from ..base import SandboxInfo

MANAGED = "paracle.managed"
BACKEND = "paracle.backend"
SESSION = "paracle.session"
_ID = "paracle.sandbox_id"
_OWNER = "paracle.owner"
_CREATED = "paracle.created_at"
_CONFIG = "paracle.config"
_LABELS = "paracle.labels"
_SHOWN = {"cpu_cores", "memory_mb", "disk_mb", "network_mode", "base_image"}


def container_name(sandbox_id: str) -> str:
    return f"paracle-sandbox-{sandbox_id}"


def labels_of(
    sandbox_id: str,
    backend: str,
    session: str,
    owner: Owner,
    config: SandboxConfig,
    labels: Mapping[str, str],
) -> dict[str, str]:
    return {
        MANAGED: "true",
        BACKEND: backend,
        SESSION: session,
        _ID: sandbox_id,
        _OWNER: str(owner),
        _CREATED: f"{time.time():.3f}",
        _CONFIG: json.dumps(config.model_dump(mode="json", include=_SHOWN)),
        _LABELS: json.dumps(dict(labels)),
    }


def sandbox_info(container: Mapping[str, Any]) -> SandboxInfo | None:
    """What a listed container says of itself; None when it is none of ours."""
    labels = container.get("Labels") or {}
    sandbox_id, owner = labels.get(_ID, ""), Owner.parse(labels.get(_OWNER, ""))
    if owner is None or f"/{container_name(sandbox_id)}" not in (container.get("Names") or ()):
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
