"""The texts that an engine keeps for us: on a container or an instance, under a prefix.

Any user of the engine may change them. What is read back is shown, and not used for anything else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from ...config import SandboxConfig
from ..values import SandboxInfo
from .owner import Owner

_CREATED, _CONFIG, _LABELS = "created_at", "config", "labels"
_SHOWN = {"cpu_cores", "memory_mb", "disk_mb", "network_mode", "base_image"}


def to_texts(prefix: str, config: SandboxConfig, labels: Mapping[str, str]) -> dict[str, str]:
    return {
        prefix + _CREATED: f"{time.time():.3f}",
        prefix + _CONFIG: json.dumps(config.model_dump(mode="json", include=_SHOWN)),
        prefix + _LABELS: json.dumps(dict(labels)),
    }


def to_sandbox_info(
    prefix: str, texts: Mapping[str, str], sandbox_id: str, backend: str, state: str, owner: Owner
) -> SandboxInfo:
    alive = owner.is_alive
    return SandboxInfo(
        sandbox_id=sandbox_id,
        backend=backend,
        state=state if alive else "lost",
        owner_pid=owner.pid,
        owner_alive=alive,
        created_at=_number(texts.get(prefix + _CREATED)),
        config=_object(texts.get(prefix + _CONFIG)),
        labels=_object(texts.get(prefix + _LABELS)),
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
