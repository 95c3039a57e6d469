"""Take from a request what routes need: service, caller and user; and say how they log refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Header, Query, Request, WebSocket
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse, Response

from ...errors import SandboxError
from ..errors import (
    BadRequest,
    Forbidden,
    NotFound,
    ServiceFault,
    fault_body,
    is_refusal,
    status_of,
)
from ..keys import Caller
from ..service import Service
from ..users.names import user_in
from .escaped_paths import unescape

T = TypeVar("T")

MAX_PAGE = 1000
MAX_OFFSET = 1 << 40
_MAX_TOLD = 200
_MOMENT_SECONDS = 0.05


def service_of(connection: HTTPConnection) -> Service:
    return cast(Service, connection.app.state.service)


def caller_of(connection: HTTPConnection) -> Caller:
    return cast(Caller, connection.scope["state"]["caller"])


def user_of(connection: HTTPConnection) -> str:
    """Return the user in the address. A user of another key is answered like a missing one."""
    user_id = user_in(connection.path_params["user_id"])
    if not caller_of(connection).may_act_for(user_id):
        _note(connection, "other_user", user=user_id)
        raise NotFound("Sandbox not found")
    return _remember_user(connection, user_id)


def acting_user_of(connection: HTTPConnection) -> str:
    """Return the user a remote client acts for: the one in the header (encoded as in an address),
    or the only one of its key."""
    caller = caller_of(connection)
    named = connection.headers.get("x-sandbox-user")
    if named is None:
        if caller.admin:
            return _remember_user(connection, f"key:{caller.key_id}")
        if len(caller.users) != 1:
            raise BadRequest("This key acts for several users: name one in X-Sandbox-User")
        return _remember_user(connection, next(iter(caller.users)))
    user_id = user_in(named)
    if not caller.may_act_for(user_id):
        _note(connection, "other_user", user=user_id)
        raise NotFound("Sandbox not found")
    return _remember_user(connection, user_id)


def _remember_user(connection: HTTPConnection, user_id: str) -> str:
    """Remember the user of a request, for the log."""
    connection.scope["state"]["user"] = user_id
    return user_id


def admin_of(connection: HTTPConnection) -> Caller:
    caller = caller_of(connection)
    if not caller.admin:
        raise note_refusal(connection, "admin_only", Forbidden("Only an admin key may do this"))
    return caller


# Each refusal is counted, and has one line in the log.


def note_fault(connection: HTTPConnection, fault: ServiceFault | SandboxError) -> None:
    """Count and log a failure, if it is a refusal and not noted already."""
    if is_refusal(fault) and not getattr(fault, "noted", False):
        body = fault_body(fault)
        note_bad_input(connection, body["error"], body["kind"])


def note_bad_input(connection: HTTPConnection, what: str, reason: str = "bad_input") -> None:
    """Count and log a bad request. ``what`` is our text, without code or secrets of the client."""
    _note(connection, reason, what=what[:_MAX_TOLD], **_user_fields(connection))


def note_refusal(
    connection: HTTPConnection, reason: str, fault: ServiceFault, **fields: object
) -> ServiceFault:
    """Count and log a refusal with more fields than the fault has. Returns the fault."""
    _note(connection, reason, **_user_fields(connection), **fields)
    fault.noted = True
    return fault


def _user_fields(connection: HTTPConnection) -> dict[str, str]:
    """Return the user for the log, or the text that names none of the caller's. Only users are
    counted for suspicion: a flood of other texts would fill the memory."""
    if "user" in connection.scope["state"]:
        return {"user": connection.scope["state"]["user"]}
    text = connection.path_params.get("user_id") or connection.headers.get("x-sandbox-user")
    if not text:
        return {}
    with suppress(BadRequest):  # a body that cannot be read is refused before anybody is known
        user_id = user_in(text)
        if caller_of(connection).may_act_for(user_id):
            return {"user": user_id}
    return {"no_user": text[:_MAX_TOLD]}


def _note(connection: HTTPConnection, reason: str, **fields: Any) -> None:
    service = service_of(connection)
    caller: Caller | None = connection.scope["state"].get("caller")
    service.metrics.refusals.labels(reason).inc()
    service.journal.record_refusal(reason, key=caller.key_id if caller else None, **fields)


# FastAPI tells a Request from a WebSocket by type, and runs what is not async in a thread.
async def _service(request: Request) -> Service:
    return service_of(request)


async def _user(user_id: str, request: Request) -> str:
    return user_of(request)


async def _acting_user(
    request: Request,
    # It is read in acting_user_of(), and declared here for the description.
    user: Annotated[
        str | None,
        Header(
            alias="X-Sandbox-User",
            description="The user to act for, encoded as in an address; needed with a key for "
            "several",
        ),
    ] = None,
) -> str:
    return acting_user_of(request)


async def _admin(request: Request) -> Caller:
    return admin_of(request)


TheService = Annotated[Service, Depends(_service)]
TheUser = Annotated[str, Depends(_user)]
ActingUser = Annotated[str, Depends(_acting_user)]
TheAdmin = Annotated[Caller, Depends(_admin)]


async def _file_path(
    path: Annotated[str, Query(min_length=1, max_length=4096)],
    escaped: Annotated[
        bool, Query(description="Whether the path is escaped, as in a list of files")
    ] = False,
) -> str:
    return unescape(path) if escaped else path


FilePath = Annotated[str, Depends(_file_path)]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def next_offset(offset: int, limit: int, total: int) -> int | None:
    return offset + limit if offset + limit < total else None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, and cancel it when the client goes away, with everything it started. Raises
    ClientDisconnect then. The client is watched after a moment, by which most work is done."""
    loop, doer = asyncio.get_running_loop(), asyncio.current_task()
    assert doer is not None
    watches: list[asyncio.Task[bool]] = []

    def watch() -> None:
        watches.append(asyncio.create_task(_cancel_when_gone(request.receive, doer)))

    timer = loop.call_later(_MOMENT_SECONDS, watch)
    try:
        return await work
    except asyncio.CancelledError:
        if not any(task.done() and not task.cancelled() and task.result() for task in watches):
            raise
        doer.uncancel()
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        for task in watches:
            task.cancel()


async def _cancel_when_gone(receive: Callable[[], Awaitable[Any]], doer: asyncio.Task[Any]) -> bool:
    while (await receive())["type"] != "http.disconnect":
        pass
    doer.cancel()
    return True


def error_body(connection: HTTPConnection, error: ServiceFault | SandboxError) -> dict[str, Any]:
    """Return the JSON of a failure, without paths that are for the operator."""
    body = fault_body(error)
    caller: Caller | None = connection.scope["state"].get("caller")
    if caller is None or not caller.admin:
        body["error"] = service_of(connection).hide(body["error"])
    return body


class Json(JSONResponse):
    """JSON with any text: lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


async def deny_socket(socket: WebSocket, fault: ServiceFault | SandboxError) -> None:
    """Refuse a WebSocket with the answer that an HTTP request would get."""
    note_fault(socket, fault)
    status = fault.status if isinstance(fault, ServiceFault) else status_of(fault)
    body = json.dumps(error_body(socket, fault))
    await socket.send_denial_response(Response(body, status, media_type="application/json"))
