"""Write labels on an instance, in its ``user.*`` keys, and read those that we believe.

An instance counts as ours only if its name is the one that its keys make: a profile or a copy may
carry the same keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ...config import SandboxConfig
from ..base import SandboxInfo
from ..machine import engine_labels
from ..machine.owner import Owner

_PREFIX = "user.paracle."
BACKEND = _PREFIX + "backend"
SESSION = _PREFIX + "session"
WARM = _PREFIX + "warm"
_ID = _PREFIX + "sandbox_id"
_OWNER = _PREFIX + "owner"


def instance_name(sandbox_id: str) -> str:
    """Return the name of a sandbox's instance. The server allows letters, digits and dashes, 63 of
    them; an id may have other characters."""
    return f"paracle-{_digest(sandbox_id)}"


def cold_name(sandbox_id: str) -> str:
    """Return the name of the instance that becomes that sandbox, while its image is unpacked."""
    return f"paracle-cold-{_digest(sandbox_id)}"


def warm_name(token: str) -> str:
    """Return the name of a ready instance, which no sandbox has yet."""
    return f"paracle-warm-{token}"


def _digest(sandbox_id: str) -> str:
    return hashlib.sha256(sandbox_id.encode()).hexdigest()[:24]


def owner_keys(backend: str, session: str, owner: Owner) -> dict[str, str]:
    """Return the keys of everything that we make, whatever it is for."""
    return {BACKEND: backend, SESSION: session, _OWNER: str(owner)}


def sandbox_keys(
    sandbox_id: str, config: SandboxConfig, labels: Mapping[str, str]
) -> dict[str, str]:
    return {_ID: sandbox_id, **engine_labels.to_texts(_PREFIX, config, labels)}


def owner_of(instance: Mapping[str, Any], backend: str) -> Owner | None:
    """Return the owner of an instance; None when it is not ours, or of another backend."""
    keys = instance.get("config") or {}
    name = str(instance.get("name"))
    # It is renamed when it becomes a sandbox, and is ours at every moment.
    sandbox_id = keys.get(_ID, "")
    names = (instance_name(sandbox_id), cold_name(sandbox_id), warm_name(keys.get(WARM, "")))
    if name not in names:
        return None
    if keys.get(BACKEND) != backend:
        return None
    return Owner.parse(keys.get(_OWNER, ""))


def sandbox_info(instance: Mapping[str, Any], backend: str) -> SandboxInfo | None:
    """Return what a listed instance says about itself; None when it is no sandbox of ours."""
    keys = instance.get("config") or {}
    owner = owner_of(instance, backend)
    sandbox_id = str(keys.get(_ID, ""))
    if owner is None or instance.get("name") != instance_name(sandbox_id):
        return None
    state = str(instance.get("status")).lower()
    state = {"stopped": "creating"}.get(state, state)
    return engine_labels.to_sandbox_info(_PREFIX, keys, sandbox_id, backend, state, owner)
