"""Routes for the library's remote backend: sandboxes, and the channel to their guests."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from ...channel.resumable import OutOfStep
from ...config import InvalidConfigError, SandboxConfig
from ...errors import SandboxError
from ..errors import BadRequest, ServiceFault, Unprocessable, first_fault
from ..remote.leases import Lease
from ..remote.relay import Relay
from ..schemas import LeaseRequest
from ..users.config_policy import checked_config
from .dependencies import (
    ActingUser,
    TheService,
    acting_user_of,
    deny_socket,
    service_of,
)
from .strict_json import StrictRoute

router = APIRouter(prefix="/v1/sandboxes", tags=["remote"], route_class=StrictRoute)

CLOSE_OUT_OF_STEP = 4409


@router.post("", status_code=201)
async def create(service: TheService, user: ActingUser, body: LeaseRequest) -> dict[str, Any]:
    """Make a sandbox under an id of the client's choice."""
    try:
        config = checked_config(service.settings, SandboxConfig.model_validate(body.config))
    except InvalidConfigError as error:
        raise Unprocessable(f"Not a configuration: {first_fault(error)}") from None
    return describe(await service.leases.create(user, body.sandbox_id, config, body.labels))


@router.get("")
async def list_leases(service: TheService, user: ActingUser) -> dict[str, Any]:
    """List the sandboxes that are lent to this user."""
    return {"sandboxes": [describe(lease) for lease in service.leases.all(user)]}


@router.get("/{sandbox_id}/usage")
async def usage(service: TheService, user: ActingUser, sandbox_id: str) -> dict[str, Any]:
    """Report what it uses now, and the kernel's counts of limits that were reached."""
    return asdict(await service.leases.usage(service.leases.get(user, sandbox_id)))


@router.delete("/{sandbox_id}")
async def remove(service: TheService, user: ActingUser, sandbox_id: str) -> dict[str, Any]:
    """Remove it with everything in it; gone is success."""
    gone = await service.leases.remove(user, sandbox_id)
    return {"status": "deleted" if gone else "not_found"}


@router.websocket("/{sandbox_id}/channel")
async def channel(socket: WebSocket) -> None:
    """The byte stream to its guest, in the messages of channel.resumable."""
    service = service_of(socket)
    try:
        user = acting_user_of(socket)
        lease = service.leases.get(user, socket.path_params["sandbox_id"])
        received = _parse_received(socket)
        relay = await service.leases.relay(lease)
    except (ServiceFault, SandboxError) as fault:
        await deny_socket(socket, fault)
        return
    await socket.accept()
    await _talk(socket, relay, received)


async def _talk(socket: WebSocket, relay: Relay, received: int) -> None:
    holder = -1
    try:
        holder = await relay.attach(socket.send_bytes, received)
        while True:
            await relay.take(await socket.receive_bytes(), holder)
    except OutOfStep:
        with suppress(RuntimeError, WebSocketDisconnect):
            await socket.close(CLOSE_OUT_OF_STEP)
    except (WebSocketDisconnect, KeyError, RuntimeError):
        pass  # the client is gone, or sent text
    finally:
        relay.detach(holder)


def _parse_received(socket: WebSocket) -> int:
    text = socket.query_params.get("received", "0")
    if not text.isdecimal() or len(text) > 20:
        raise BadRequest("received is a number of bytes")
    return int(text)


def describe(lease: Lease) -> dict[str, Any]:
    shown = {"cpu_cores", "memory_mb", "disk_mb", "network_mode", "base_image"}
    return {
        "sandbox_id": lease.sandbox_id,
        "state": "running",
        "created_at": lease.created_at,
        "config": lease.config.model_dump(mode="json", include=shown),
        "labels": dict(lease.labels),
    }
