"""Write labels on a container, and read back those that we believe.

An image may carry labels too, ours among them. So a container is taken for one of ours only if
its name is the one that its label makes: names are given by whoever starts a container, and
cannot come from an image.

A container that is made to look at an image, and never started, is no sandbox and has no id. Its
names are those that older versions gave to containers which they kept ready.
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
_LOOK = _PREFIX + "ready"
_OWNER = _PREFIX + "owner"
_NAME = "paracle-sandbox-"


def container_name(sandbox_id: str) -> str:
    return f"{_NAME}{sandbox_id}"


def _look_name(token: str) -> str:
    return f"paracle-ready-{token}"


@dataclass(frozen=True)
class Title:
    """The identity of a container: its name, and the labels that say its purpose."""

    name: str
    labels: Mapping[str, str]


def sandbox_title(sandbox_id: str) -> Title:
    return Title(container_name(sandbox_id), {_ID: sandbox_id})


def look_title(token: str) -> Title:
    """The title of a container that is made only to look at its image."""
    return Title(_look_name(token), {_LOOK: token})


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
        **engine_labels.to_texts(_PREFIX, config, labels),
    }


def owner_of(container: Mapping[str, Any]) -> Owner | None:
    """Return the owner of a listed container, which may be a sandbox or one for a look; None when
    it is not ours."""
    labels = container.get("Labels") or {}
    is_look = f"/{_look_name(labels.get(_LOOK, ''))}" in (container.get("Names") or ())
    return Owner.parse(labels.get(_OWNER, "")) if is_look or _sandbox_id(container) else None


def _sandbox_id(container: Mapping[str, Any]) -> str:
    """Return its sandbox's id; empty when it is no sandbox of ours."""
    labels, names = container.get("Labels") or {}, container.get("Names") or ()
    sandbox_id = str(labels.get(_ID, ""))
    return sandbox_id if f"/{container_name(sandbox_id)}" in names else ""


def sandbox_info(container: Mapping[str, Any]) -> SandboxInfo | None:
    """Return what a listed container says about itself; None when it is no sandbox of ours."""
    labels = container.get("Labels") or {}
    sandbox_id, owner = _sandbox_id(container), owner_of(container)
    if owner is None or not sandbox_id:
        return None
    state = str(container.get("State"))
    state = {"created": "creating"}.get(state, state)
    return engine_labels.to_sandbox_info(
        _PREFIX, labels, sandbox_id, labels.get(BACKEND, ""), state, owner
    )
