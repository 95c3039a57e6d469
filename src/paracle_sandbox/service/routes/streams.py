"""Routes that follow a program while it runs: server-sent events, WebSockets, terminals."""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from ...errors import InvalidValueError, SandboxError, StoppedError
from ...sandbox.command import Command
from ..errors import INTERNAL, BadRequest, Conflict, ServiceFault, TooLarge, fault_body, first_fault
from ..middleware.body_limits import check_json
from ..schemas import RunRequest
from ..service import Service
from ..users.executions import Program, Run, stopped_answer
from .dependencies import (
    TheService,
    TheUser,
    deny_socket,
    error_body,
    note_bad_input,
    note_fault,
    service_of,
    user_of,
)
from .strict_json import StrictRoute, parse_json

logger = logging.getLogger(__name__)
router = APIRouter(tags=["streams"], route_class=StrictRoute)

_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, as they happen"}
}
_MAX_TERMINAL_SIZE = 1000
MAX_INPUT = 1 << 20
_ALIVE_SECONDS = 15.0
_FIRST_SECONDS = 20.0

Event = dict[str, Any]


@router.post("/sandbox/{user_id}/stream", response_class=Response, responses=_EVENTS)
async def stream(service: TheService, user: TheUser, body: RunRequest) -> Response:
    """Run a program and follow it: events ``start``, ``stdout``, ``stderr`` and at the end
    ``result`` or ``error``. Who goes away ends it."""
    stack = AsyncExitStack()
    run = await stack.enter_async_context(service.runner.following(user, Program.of(body)))
    return sse(_closing(stack, events(service, run)))


@router.get(
    "/sandbox/{user_id}/commands/{command_id}/stream", response_class=Response, responses=_EVENTS
)
async def follow(service: TheService, user: TheUser, command_id: str) -> Response:
    """Follow a background command from its beginning. Who goes away leaves it running."""
    return sse(events(service, service.background.get(user, command_id)))


@router.websocket("/sandbox/{user_id}/ws")
async def run_over_websocket(socket: WebSocket) -> None:
    """First a message with a program, as for /stream; then its events. Meanwhile messages
    {"stdin": text}, {"stdin_base64": text}, {"close_stdin": true}, {"signal": 15} reach it."""
    await _serve(socket, _run_program)


@router.websocket("/sandbox/{user_id}/terminal")
async def terminal(socket: WebSocket) -> None:
    """A shell on a terminal: binary messages are what is typed and shown; {"resize": [rows,
    columns]} changes its size; at the end comes {"exit_code": 0}."""
    await _serve(socket, _run_terminal)


# Events


async def events(service: Service, run: Run) -> AsyncGenerator[Event, None]:
    """Yield the events of a program, from its beginning to its end."""
    yield {
        "event": "start", "command_id": run.command_id, "sandbox_id": run.owned.sandbox.id,
        "recreated": run.recreated,
    }  # fmt: skip
    if run.loss is not None:
        service.losses.tell(run.loss)  # the next event is asked for once this one is sent
    decoders = {
        name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
    }
    async for name, data in run.output():
        if text := decoders[name].decode(data):
            yield {"event": name, "text": text}
    for name, decoder in decoders.items():
        if text := decoder.decode(b"", final=True):
            yield {"event": name, "text": text}
    yield await _last(service, run)


async def _last(service: Service, run: Run) -> Event:
    try:
        result = await run.command.wait()
    except StoppedError as error:
        kept = await service.runner.keep(run)
        answer = stopped_answer(error, hide=service.hide, recreated=run.recreated, files_kept=kept)
        del answer["result"], answer["output"]
        return {"event": "error", **answer}
    except SandboxError as error:
        return {"event": "error", "success": False, **fault_body(error),
                "error": service.hide(error.message)}  # fmt: skip
    return {
        "event": "result",
        "success": result["exit_code"] == 0,
        "exit_code": result["exit_code"],
        "files_kept": await service.runner.keep(run),
    }


async def _closing(
    stack: AsyncExitStack, source: AsyncIterator[Event]
) -> AsyncGenerator[Event, None]:
    async with stack:
        async for event in source:
            yield event


def sse(source: AsyncGenerator[Event, None]) -> Response:
    """Send events as they come, and comments in between: proxies close a silent connection."""

    async def lines() -> AsyncIterator[bytes]:
        following = asyncio.ensure_future(anext(source, None))
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=_ALIVE_SECONDS)
                if not done:
                    yield b": still running\n\n"
                    continue
                event = following.result()
                if event is None:
                    return
                yield f"event: {event['event']}\ndata: {json.dumps(event)}\n\n".encode()
                following = asyncio.ensure_future(anext(source, None))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await source.aclose()

    return StreamingResponse(lines(), media_type="text/event-stream")


# WebSockets

Conversation = Callable[[Service, str, WebSocket], Awaitable[None]]


async def _serve(socket: WebSocket, talk: Conversation) -> None:
    """Check the user, have the conversation, and send a failure as the last message."""
    service = service_of(socket)
    try:
        user = user_of(socket)
    except ServiceFault as fault:
        await deny_socket(socket, fault)
        return
    await socket.accept()
    try:
        with suppress(WebSocketDisconnect):
            await talk(service, user, socket)
    except (ServiceFault, SandboxError) as fault:
        note_fault(socket, fault)
        await _send_last(socket, {"event": "error", "success": False, **error_body(socket, fault)})
    except (ValidationError, InvalidValueError, json.JSONDecodeError) as error:
        note_bad_input(socket, "a message that makes no sense")
        text = first_fault(error) if isinstance(error, ValidationError) else str(error)
        await _send_last(socket, {"event": "error", "success": False, "error": text[:500]})
    except Exception as error:
        # It is our own fault: the client learns that, and the log has the details.
        logger.error("WebSocket %r broke", socket.url.path, exc_info=error)
        await _send_last(socket, {"event": "error", "success": False, "error": INTERNAL})
    with suppress(RuntimeError, WebSocketDisconnect):
        await socket.close()


async def _send_last(socket: WebSocket, event: Event) -> None:
    with suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_text(json.dumps(event))


async def _run_program(service: Service, user: str, socket: WebSocket) -> None:
    try:
        async with asyncio.timeout(_FIRST_SECONDS):
            first = await socket.receive_text()
    except TimeoutError:
        raise BadRequest(f"No program came within {_FIRST_SECONDS:g} seconds") from None
    body = RunRequest.model_validate(_object(first))
    async with service.runner.following(user, Program.of(body)) as run:
        await _both_ways(_listen(socket, run), _tell(service, socket, run))


async def _tell(service: Service, socket: WebSocket, run: Run) -> None:
    async for event in events(service, run):
        await socket.send_text(json.dumps(event))


async def _listen(socket: WebSocket, run: Run) -> None:
    command = run.command
    while True:
        message = _object(await socket.receive_text())
        if not run.takes_input and {"stdin", "stdin_base64"} & message.keys():
            raise Conflict(
                "Its input is closed: give keep_stdin with the program, and close it last"
            )
        with suppress(BrokenPipeError):
            if "stdin" in message:
                await command.write_stdin(str(message["stdin"]))
            if "stdin_base64" in message:
                await command.write_stdin(base64.b64decode(str(message["stdin_base64"])))
        if message.get("close_stdin"):
            run.takes_input = False
            await command.close_stdin()
        number = message.get("signal")
        if isinstance(number, int) and 0 < number <= 64:
            await command.send_signal(number)


async def _run_terminal(service: Service, user: str, socket: WebSocket) -> None:
    size = (_size(socket, "rows", 24), _size(socket, "columns", 80))
    text = socket.query_params.get("command", "command -v bash >/dev/null && exec bash; exec sh")
    program = Program("terminal", text, 3600, {"pty": size, "stdin": True})
    async with service.runner.following(user, program) as run:
        await _both_ways(_type(socket, run.command), _show(service, socket, run))


async def _show(service: Service, socket: WebSocket, run: Run) -> None:
    async for _, data in run.output():
        await socket.send_bytes(data)
    last = await _last(service, run)
    await socket.send_text(json.dumps({key: last.get(key) for key in ("exit_code", "error")}))


async def _type(socket: WebSocket, command: Command) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        with suppress(BrokenPipeError):
            if message.get("bytes"):
                await command.write_stdin(message["bytes"])
            elif message.get("text"):
                await _control(command, _object(message["text"]))


async def _control(command: Command, message: dict[str, Any]) -> None:
    if "stdin" in message:
        await command.write_stdin(str(message["stdin"]))
    match message.get("resize"):
        case [int(rows), int(columns)] if 0 < rows <= 1000 and 0 < columns <= 1000:
            await command.resize(rows, columns)


async def _both_ways(listen: Awaitable[None], tell: Awaitable[None]) -> None:
    """Listen and tell until all is told or the client is gone."""
    tasks = [asyncio.ensure_future(listen), asyncio.ensure_future(tell)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _object(text: str) -> dict[str, Any]:
    if len(text) > MAX_INPUT:
        raise InvalidValueError("The message is too large")
    try:
        check_json(text)
    except TooLarge as fault:
        raise InvalidValueError(str(fault)) from None
    value = parse_json(text)
    if not isinstance(value, dict):
        raise InvalidValueError("A message is a JSON object")
    return value


def _size(socket: WebSocket, name: str, default: int) -> int:
    text = socket.query_params.get(name, str(default))
    if not text.isdecimal() or not 0 < int(text) <= _MAX_TERMINAL_SIZE:
        raise InvalidValueError(f"{name} is a number from 1 to {_MAX_TERMINAL_SIZE}")
    return int(text)
