"""The application: assembles the routes, the error handlers and the middlewares."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from .. import __version__
from ..errors import InvalidValueError, SandboxError
from ..sandbox.outcome import MIB
from .errors import (
    INTERNAL,
    RETRY_SECONDS,
    ServiceFault,
    Unavailable,
    first_fault,
    status_of,
    strip_prefix,
)
from .middleware.auth import Gate
from .middleware.forwarded_for import ForwardedFor
from .middleware.idempotency import Idempotency
from .middleware.request_context import RequestContext
from .routes import commands, files, leases, operations, packages, sandboxes, streams
from .routes.dependencies import Json, error_body, note_bad_input, note_fault
from .routes.openapi import describe
from .schemas import ErrorAnswer
from .service import Service

logger = logging.getLogger(__name__)

MAX_OPEN_PER_KEY = 1000
# Resources that other requests have at the moment.
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,100}\Z")
_PARTS = (sandboxes, files, packages, commands, streams, operations, leases)
_STATUSES = {
    400: "The request makes no sense",
    401: "No key, or a wrong one",
    403: "Only an admin key may",
    404: "Not there, or not this caller's",
    405: "Not this method",
    408: "The rest of the request did not come in time",
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


def make_app(service: Service) -> ASGIApp:
    """Make the whole application. It starts and closes the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Paracle Sandbox service", version=__version__, lifespan=lifespan,
        docs_url=None, redoc_url=None, redirect_slashes=False, responses=_RESPONSES,
        description="A sandbox for each user. Send an API key as X-API-Key, or as a Bearer token.",
    )  # fmt: skip
    app.state.service = service
    for part in _PARTS:
        app.include_router(part.router)
    app.add_exception_handler(ServiceFault, _fault)
    app.add_exception_handler(SandboxError, _sandbox_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(InvalidValueError, _invalid_value)
    app.add_exception_handler(ValidationError, _invalid_value)
    app.add_exception_handler(OSError, _os_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _internal)
    describe(app)
    for route in app.routes:  # or the first request would wait until they are compiled
        route.matches({"type": "http", "method": "GET", "path": "/", "headers": []})
    gate = Gate(
        Idempotency(RequestContext(app, service.losses), service.answers),
        doorman=service.doorman,
        journal=service.journal,
        metrics=service.metrics,
        max_open=MAX_OPEN_PER_KEY,
        max_upload=service.settings.service_disk_mb * MIB,
    )
    return ForwardedFor(gate, service.settings.trusted_proxies)


async def _fault(request: Request, error: Exception) -> Json:
    assert isinstance(error, ServiceFault)
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.status in (408, 413):
        headers["connection"] = "close"  # or it would go on sending
    note_fault(request, error)
    return Json(error_body(request, error), error.status, headers)


async def _sandbox_error(request: Request, error: Exception) -> Json:
    assert isinstance(error, SandboxError)
    status = status_of(error)
    body = error_body(request, error)
    level = logging.WARNING if status >= 500 else logging.INFO
    logger.log(
        level, "%s %r failed (%s): %s", request.method, request.url.path, body["kind"], error
    )
    note_fault(request, error)
    headers = {"retry-after": str(RETRY_SECONDS)} if body["retryable"] else {}
    return Json(body, status, headers)


async def _os_error(request: Request, error: Exception) -> Json:
    """Answer 503 where the service has no descriptors, memory or threads left at present."""
    assert isinstance(error, OSError)
    if error.errno not in _USED_UP:
        return await _internal(request, error)
    logger.error("%s %r failed: %s", request.method, request.url.path, error.strerror)
    busy = Unavailable(f"The service has no room now: {error.strerror}", RETRY_SECONDS)
    return await _fault(request, busy)


async def _invalid(request: Request, error: Exception) -> Json:
    assert isinstance(error, RequestValidationError)
    faults = [
        {"where": ".".join(map(str, one["loc"])), "what": strip_prefix(one["msg"])}
        for one in error.errors()[:20]
    ]
    first = faults[0] if faults else {"where": "body", "what": "invalid"}
    # The client chose the name of the field: what does not look like one may be code.
    note_bad_input(request, first["where"] if _FIELD.match(first["where"]) else "body")
    return _plain(422, f"{first['where']}: {first['what']}", "ValidationError", details=faults)


async def _http_error(request: Request, error: Exception) -> Json:
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
    """Return the methods of all routes with this address: each route knows only its own."""
    routes = (route for part in _PARTS for route in part.router.routes)
    return {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


async def _invalid_value(request: Request, error: Exception) -> Json:
    """Answer 400 for a value that a check of ours refused. Any other ValueError is a 500."""
    note_bad_input(request, "a value that makes no sense")
    text = first_fault(error) if isinstance(error, ValidationError) else str(error)
    return _plain(400, text[:500], "ValueError")


async def _gone(request: Request, error: Exception) -> Json:
    """End a request whose client is gone: the answer goes nowhere."""
    return _plain(400, "The client went away", "ClientDisconnect")


async def _internal(request: Request, error: Exception) -> Json:
    logger.error("%s %r broke", request.method, request.url.path, exc_info=error)
    return _plain(500, INTERNAL, "InternalError", kind="internal")


def _plain(
    status: int, message: str, error_type: str, kind: str = "bad_input", details: object = None
) -> Json:
    body = {"error": message, "error_type": error_type, "kind": kind, "details": details}
    return Json(body, status)
