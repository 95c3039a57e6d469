"""Routes for operators: health, readiness, figures, keys."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ... import __version__
from ..errors import NotFound
from ..keys import Key
from ..metrics import CONTENT_TYPE
from ..schemas import HealthAnswer, KeyRequest
from .dependencies import TheAdmin, TheService, caller_of
from .strict_json import StrictRoute

router = APIRouter(tags=["operations"], route_class=StrictRoute)

_NO_KEY: dict[str, Any] = {"security": []}


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=HealthAnswer, openapi_extra=_NO_KEY)
async def health(service: TheService) -> dict[str, Any]:
    """Whether the service answers, and with which backend. Needs no key."""
    return {
        "status": "healthy" if service.ready else "unhealthy",
        "docker": service.ready and service.backend.name in ("docker", "gvisor"),
        "version": __version__,
        "backend": service.backend.name,
    }


@router.head("/ready", include_in_schema=False)
@router.get(
    "/ready", responses={503: {"description": "Not yet, or no longer"}}, openapi_extra=_NO_KEY
)
async def ready(service: TheService) -> Response:
    """Whether it can make sandboxes now. Needs no key."""
    return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)


@router.get("/info")
async def info(request: Request, service: TheService) -> dict[str, Any]:
    """Report what this service gives to each user. The number of live sandboxes is of those that
    the key acts for."""
    caller = caller_of(request)
    settings, found = service.settings, service.health
    return {
        "version": __version__,
        "backend": service.backend.name,
        "ready": service.ready,
        "layers": {layer.name: layer.in_force for layer in (found.layers if found else ())},
        "max_containers": settings.max_containers,
        "live_sandboxes": service.live_of(caller),
        "idle_timeout": settings.service_idle_timeout,
        "memory_mb": settings.service_memory_mb,
        "cpu_cores": settings.service_cpu_cores,
        "disk_mb": settings.service_disk_mb,
        "packages": settings.packages,
    }


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: TheService, admin: TheAdmin) -> Response:
    """Figures for Prometheus. Needs an admin key."""
    text = service.metrics.text(service.live, service.journal.failures)
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/keys")
async def list_keys(service: TheService, admin: TheAdmin) -> dict[str, Any]:
    """The API keys, without their secrets. Needs an admin key."""
    return {"keys": [_describe(key) for key in await service.keys.in_thread(service.keys.all)]}


@router.post("/keys", status_code=201)
async def make_key(service: TheService, admin: TheAdmin, body: KeyRequest) -> dict[str, Any]:
    """A new key, shown this once. Needs an admin key."""
    expires = None if body.expires_in is None else time.time() + body.expires_in
    keys = service.keys
    text = await keys.in_thread(
        keys.make, body.users, admin=body.admin, expires=expires, note=body.note
    )
    service.journal.record("key_made", by=admin.key_id, key=text.split("_")[1], admin=body.admin)
    return {"key": text, "key_id": text.split("_")[1]}


@router.delete("/keys/{key_id}")
async def revoke_key(service: TheService, admin: TheAdmin, key_id: str) -> dict[str, Any]:
    """The key opens nothing from now on. Needs an admin key."""
    if not await service.keys.in_thread(service.keys.revoke, key_id):
        raise NotFound("There is no such key, or it was revoked before")
    service.journal.record("key_revoked", by=admin.key_id, key=key_id)
    return {"status": "revoked", "key_id": key_id}


def _describe(key: Key) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "users": list(key.users),
        "admin": key.admin,
        "note": key.note,
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
    }
