"""The application: routes, failures and the gate, put together."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from .. import __version__
from ..errors import SandboxError
from ..limits import MIB
from .asked import note_bad_input, note_fault
from .description import describe
from .faults import RETRY_SECONDS, ServiceFault, fault_body, plainly, status_of
from .gate import App, Gate
from .idempotency import Idempotency
from .routes import commands, files, leases, operations, packages, sandboxes, streams
from .service import Service
from .shapes import ErrorAnswer
from .straight import Straight
from .telling import Telling

logger = logging.getLogger(__name__)

MAX_OPEN_PER_KEY = 1000
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,100}\Z")
_PARTS = (sandboxes, files, packages, commands, streams, operations, leases)
_STATUSES = {
    400: "The request makes no sense",
    401: "No key, or a wrong one",
    403: "Only an admin key may",
    404: "Not there, or not this caller's",
    405: "Not this method",
    409: "It is in the way of something",
    413: "Too large",
    416: "Nothing lies in that range",
    422: "A field is missing, unknown or out of range",
    429: "A quota; Retry-After says when to come back",
    500: "A fault of the service",
    502: "The sandbox was lost",
    503: "No room, or no sandboxes, at present",
    504: "It took too long",
    507: "A limit of the sandbox",
}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _STATUSES.items()
}


def make_app(service: Service) -> App:
    """The whole application. The service is started and closed with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Paracle Sandbox service", version=__version__, lifespan=lifespan,
        docs_url=None, redoc_url=None, responses=_RESPONSES,
        description="A sandbox for each user. Send an API key as X-API-Key, or as a Bearer token.",
    )  # fmt: skip
    app.state.service = service
    for part in _PARTS:
        app.include_router(part.router)
    app.add_exception_handler(ServiceFault, _fault)
    app.add_exception_handler(SandboxError, _sandbox_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ValueError, _value_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _internal)
    describe(app)
    return Gate(
        Idempotency(Telling(Straight(app), service.losses), service.answers),
        doorman=service.doorman,
        journal=service.journal,
        metrics=service.metrics,
        max_open=MAX_OPEN_PER_KEY,
        max_upload=service.settings.service_disk_mb * MIB,
    )


async def _fault(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceFault)
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.status == 413:
        headers["connection"] = "close"  # or it would go on sending
    note_fault(request, error)
    return JSONResponse(fault_body(error), error.status, headers)


async def _sandbox_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SandboxError)
    status = status_of(error)
    body = fault_body(error)
    level = logging.WARNING if status >= 500 else logging.INFO
    logger.log(
        level, "%s %r failed (%s): %s", request.method, request.url.path, body["kind"], error
    )
    note_fault(request, error)
    headers = {"retry-after": str(RETRY_SECONDS)} if body["retryable"] else {}
    return JSONResponse(body, status, headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [
        {"where": ".".join(map(str, one["loc"])), "what": plainly(one["msg"])}
        for one in error.errors()[:20]
    ]
    first = faults[0] if faults else {"where": "body", "what": "invalid"}
    # Names of fields are the client's: what is none may be anything, also code.
    note_bad_input(request, first["where"] if _FIELD.match(first["where"]) else "body")
    return _plain(422, f"{first['where']}: {first['what']}", "ValidationError", details=faults)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ServiceFault):  # raised while the body was read
        return await _fault(request, error.__cause__)
    if error.status_code == 400:
        note_bad_input(request, "a body that cannot be read")
    kind = "not_found" if error.status_code == 404 else "bad_input"
    answer = _plain(error.status_code, str(error.detail), "HTTPException", kind=kind)
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["allow"] = ", ".join(sorted(_methods_of(request)))
    return answer


def _methods_of(request: Request) -> set[str]:
    """All that its address takes: each route knows only of its own."""
    routes = (route for part in _PARTS for route in part.router.routes)
    return {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


async def _value_error(request: Request, error: Exception) -> JSONResponse:
    note_bad_input(request, "a value that makes no sense")
    return _plain(400, str(error)[:500], "ValueError")


async def _gone(request: Request, error: Exception) -> JSONResponse:
    """Nobody is there to read it."""
    return _plain(400, "The client went away", "ClientDisconnect")


async def _internal(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %r broke", request.method, request.url.path, exc_info=error)
    return _plain(500, "Internal server error", "InternalError", kind="internal")


def _plain(
    status: int, message: str, error_type: str, kind: str = "bad_input", details: object = None
) -> JSONResponse:
    body = {"error": message, "error_type": error_type, "kind": kind, "details": details}
    return JSONResponse(body, status)
