"""Routes for users' sandboxes: make, run in, look at, remove."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ...config import InvalidConfigError, SandboxConfig
from ...errors import SandboxError
from ...settings import parse_memory_mb
from ..errors import NotFound, Unprocessable, first_fault
from ..schemas import (
    CreateRequest,
    DestroyAnswer,
    ExecuteRequest,
    ExecutionAnswer,
    SandboxAnswer,
    SandboxesAnswer,
    ShellRequest,
)
from ..service import Service
from ..users.config_policy import checked_config
from ..users.executions import Program
from ..users.spool import is_large, json_pieces
from ..users.user_sandboxes import UserSandbox, UserSandboxes
from .dependencies import (
    Limit,
    Offset,
    TheService,
    TheUser,
    caller_of,
    next_offset,
    while_connected,
)
from .strict_json import StrictRoute

router = APIRouter(tags=["sandboxes"], route_class=StrictRoute)

# The names that a request has for fields of a configuration.
_NAMES_IN_REQUEST = {
    "memory_mb": "memory_limit in MB",
    "cpu_cores": "cpu_limit",
    "base_image": "image",
}


@router.post("/sandbox/{user_id}/create", response_model=SandboxAnswer)
async def create(
    service: TheService, user: TheUser, body: CreateRequest | None = None
) -> dict[str, Any]:
    """The user's sandbox: made if there is none yet, else as it is."""
    config = resolve_config(service.sandboxes, body)
    async with service.sandboxes.using(user, config) as owned:
        return await describe(owned)


@router.post("/sandbox/{user_id}/execute", response_model=ExecutionAnswer)
async def execute(
    request: Request, service: TheService, user: TheUser, body: ExecuteRequest
) -> Response:
    """Run Python code. A program that fails, or is stopped, is an answer with success false."""
    program = Program("python", body.code, body.timeout)
    return to_response(await while_connected(request, service.runner.run(user, program)))


@router.post("/sandbox/{user_id}/shell", response_model=ExecutionAnswer)
async def shell(
    request: Request, service: TheService, user: TheUser, body: ShellRequest
) -> Response:
    """Run a shell command."""
    program = Program("shell", body.command, body.timeout)
    return to_response(await while_connected(request, service.runner.run(user, program)))


@router.get("/sandbox/{user_id}/status", response_model=SandboxAnswer)
async def status(service: TheService, user: TheUser) -> dict[str, Any]:
    """Report what the user's sandbox does now; 404 when there is none."""
    return await describe(_require(service, user))


@router.get("/sandbox/{user_id}/usage")
async def usage(service: TheService, user: TheUser) -> dict[str, Any]:
    """Report what the user's sandbox uses, what its kept files take, and the quotas."""
    owned = service.sandboxes.find(user)
    stats = dict(await owned.sandbox.get_stats()) if owned is not None else None
    settings = service.settings
    return {
        "user_id": user,
        "stats": stats,
        "kept_bytes": await service.workspaces.usage_bytes(service.names.workspace(user)),
        "running_executions": service.executions.running(user),
        "quotas": {
            "sandboxes": settings.user_sandboxes,
            "cpu_cores": settings.user_cpu_cores,
            "memory_mb": settings.user_memory_mb,
            "disk_mb": settings.user_disk_mb,
            "executions_per_minute": settings.user_rate,
            "concurrent_executions": settings.user_concurrent,
        },
    }


@router.post("/sandbox/{user_id}/stop", response_model=DestroyAnswer)
async def stop(service: TheService, user: TheUser) -> dict[str, Any]:
    """End the sandbox; the next request makes a new one with the kept files."""
    kept = await _remove(service, user, "stop")
    status = "not_found" if kept is None else "stopped"
    return {"status": status, "files_preserved": True, "files_kept": kept}


@router.post("/sandbox/{user_id}/restart", response_model=SandboxAnswer)
async def restart(service: TheService, user: TheUser) -> dict[str, Any]:
    """A fresh sandbox with the kept files; processes and /tmp are gone."""
    owned = service.sandboxes.find(user)
    config = owned.sandbox.config if owned is not None else None
    await _remove(service, user, "restart")
    async with service.sandboxes.using(user, config) as fresh:
        return await describe(fresh)


@router.delete("/sandbox/{user_id}/destroy", response_model=DestroyAnswer)
@router.delete("/sandbox/{user_id}", response_model=DestroyAnswer)
async def destroy(service: TheService, user: TheUser, erase_files: bool = False) -> dict[str, Any]:
    """Remove the sandbox. The files stay for the next one, unless erase_files is true."""
    kept = await _remove(service, user, "request", keep_files=not erase_files)
    if erase_files:
        await service.workspaces.erase(service.names.workspace(user))
        service.journal.record("erase_files", user=user)
    status = "not_found" if kept is None else "deleted"
    return {"status": status, "files_preserved": not erase_files, "files_kept": kept}


@router.get("/sandboxes", response_model=SandboxesAnswer)
async def list_sandboxes(
    request: Request, service: TheService, offset: Offset = 0, limit: Limit = 100
) -> dict[str, Any]:
    """The live sandboxes of the users this key acts for, page by page."""
    caller = caller_of(request)
    visible = [one for one in service.sandboxes.all() if caller.may_act_for(one.user_id)]
    shown = await asyncio.gather(*map(describe, visible[offset : offset + limit]))
    return {
        "sandboxes": shown,
        "total": len(visible),
        "next_offset": next_offset(offset, limit, len(visible)),
    }


def to_response(answer: dict[str, Any]) -> Response:
    """Return the response for an answer; a large output is sent piece by piece."""
    if is_large(answer):
        return StreamingResponse(_pieces(answer), media_type="application/json")
    return JSONResponse(answer)


async def _pieces(answer: dict[str, Any]) -> AsyncIterator[bytes]:
    for piece in json_pieces(answer):
        yield piece


def resolve_config(sandboxes: UserSandboxes, body: CreateRequest | None) -> SandboxConfig | None:
    """Return the configuration that a request names: never more than the service's default."""
    if body is None:
        return None
    base = sandboxes.default_config()
    changes: dict[str, Any] = {}
    try:
        if body.memory_limit is not None:
            changes["memory_mb"] = min(parse_memory_mb(body.memory_limit), base.memory_mb)
        if body.cpu_limit is not None:
            changes["cpu_cores"] = min(body.cpu_limit, base.cpu_cores)
        if body.image is not None:
            changes["base_image"] = body.image
        config = SandboxConfig(**{**base.model_dump(), **changes})
    except InvalidConfigError as error:
        raise Unprocessable(first_fault(error, _NAMES_IN_REQUEST)) from None
    except (ValueError, OverflowError) as error:
        raise Unprocessable(f"memory_limit: {error}") from None
    return checked_config(sandboxes.settings, config)


async def describe(owned: UserSandbox) -> dict[str, Any]:
    try:
        stats: dict[str, Any] = dict(await owned.sandbox.get_stats())
    except SandboxError:
        stats = {}
    return {
        "user_id": owned.user_id,
        "sandbox_id": owned.sandbox.sandbox_id,
        "container_id": owned.sandbox.sandbox_id,
        "status": "running" if owned.sandbox.is_running else "lost",
        "created_at": iso(owned.created_at),
        "last_used": iso(owned.last_used),
        "execution_count": owned.execution_count,
        "memory_usage_mb": stats.get("memory_mb", 0.0),
        "cpu_percent": stats.get("cpu_percent", 0.0),
        "recreated": owned.recreated,
    }


def iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _require(service: Service, user: str) -> UserSandbox:
    owned = service.sandboxes.find(user)
    if owned is None:
        raise NotFound("Sandbox not found")
    return owned


async def _remove(
    service: Service, user: str, reason: str, *, keep_files: bool = True
) -> bool | None:
    return await service.sandboxes.remove(user, reason, keep_files=keep_files)
