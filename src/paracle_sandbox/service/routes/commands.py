"""Routes for commands in the background: start, look, feed, signal, remove."""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ...errors import SandboxError
from ..errors import BadRequest, Conflict
from ..schemas import (
    CommandAnswer,
    CommandsAnswer,
    DoneAnswer,
    InputRequest,
    RunRequest,
    SignalRequest,
)
from ..service import Service
from ..users.executions import Program, Run
from ..users.spool import HeldText
from .dependencies import Limit, Offset, TheService, TheUser, next_offset
from .sandboxes import iso, to_response
from .strict_json import StrictRoute

router = APIRouter(tags=["commands"], route_class=StrictRoute)


@router.post("/sandbox/{user_id}/commands", status_code=201, response_model=CommandAnswer)
async def start(service: TheService, user: TheUser, body: RunRequest) -> dict[str, Any]:
    """Start a program and return at once; it runs until it ends, its timeout, or DELETE."""
    return await describe(service, await service.background.start(user, Program.of(body)))


@router.get("/sandbox/{user_id}/commands", response_model=CommandsAnswer)
async def list_commands(
    service: TheService, user: TheUser, offset: Offset = 0, limit: Limit = 100
) -> dict[str, Any]:
    """The background commands of the sandbox, oldest first, without their output."""
    runs = service.background.all(user)
    page = [
        await describe(service, run, with_output=False) for run in runs[offset : offset + limit]
    ]
    return {
        "commands": page,
        "total": len(runs),
        "next_offset": next_offset(offset, limit, len(runs)),
    }


@router.get("/sandbox/{user_id}/commands/{command_id}", response_model=CommandAnswer)
async def look(service: TheService, user: TheUser, command_id: str) -> Response:
    """How a command fares, and what it has printed so far, up to 2 MiB."""
    return _with_output(await describe(service, service.background.get(user, command_id)))


@router.post("/sandbox/{user_id}/commands/{command_id}/stdin", response_model=DoneAnswer)
async def feed(
    service: TheService, user: TheUser, command_id: str, body: InputRequest
) -> dict[str, Any]:
    """Write to its standard input; it must have been started with keep_stdin."""
    run = service.background.get(user, command_id)
    if not run.takes_input:
        raise Conflict("Its input is closed: start it with keep_stdin, and close it last")
    try:
        data = body.data.encode() if body.encoding == "utf-8" else base64.b64decode(body.data)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"The data cannot be read: {error}") from None
    try:
        if data:
            await run.command.write_stdin(data)
    except BrokenPipeError:
        raise Conflict("The command has ended") from None
    if body.close:
        run.takes_input = False
        await run.command.close_stdin()
    return {"output": f"Written {len(data)} bytes"}


@router.post("/sandbox/{user_id}/commands/{command_id}/signal", response_model=DoneAnswer)
async def send_signal(
    service: TheService, user: TheUser, command_id: str, body: SignalRequest
) -> dict[str, Any]:
    """Send a signal to its process group."""
    command = service.background.get(user, command_id).command
    if command.poll() is not None:
        raise Conflict("The command has ended")
    await command.send_signal(body.signal)
    return {"output": f"Signal {body.signal} sent"}


@router.delete("/sandbox/{user_id}/commands/{command_id}", response_model=CommandAnswer)
async def remove(service: TheService, user: TheUser, command_id: str) -> Response:
    """End it with everything it started, and forget it."""
    return _with_output(await describe(service, await service.background.remove(user, command_id)))


def _with_output(answer: dict[str, Any]) -> Response:
    """Return the answer with all its fields; a large output is sent in pieces."""
    fields = CommandAnswer(**answer).model_dump()
    return to_response(
        {**fields, **{name: HeldText.of(fields[name]) for name in ("stdout", "stderr")}}
    )


async def describe(service: Service, run: Run, *, with_output: bool = True) -> dict[str, Any]:
    command = run.command
    code = command.poll()
    answer: dict[str, Any] = {
        "command_id": run.command_id,
        "running": code is None,
        "exit_code": code,
        "started_at": iso(run.started_at),
    }
    if with_output:
        answer["stdout"] = command.stdout_bytes.decode("utf-8", "replace")
        answer["stderr"] = command.stderr_bytes.decode("utf-8", "replace")
    if code is not None:
        with suppress(SandboxError):
            answer["truncated"] = (await command.wait())["truncated"]
            return answer
        answer.update(await _failure(service, run))
    return answer


async def _failure(service: Service, run: Run) -> dict[str, Any]:
    try:
        await run.command.wait()
    except SandboxError as error:
        return {"error": service.hide(error.message), "error_type": type(error).__name__}
    return {}
