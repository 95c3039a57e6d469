"""Completes the OpenAPI description with API keys and the Idempotency-Key.

Middlewares check both before any route sees a request, so that no route declares them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from ..middleware.idempotency import MAX_KEY

_SCHEMES = {
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "bearer": {"type": "http", "scheme": "bearer", "description": "The same key"},
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Sent again with the same key and body, it runs once: the answer is the first",
    "schema": {"type": "string", "maxLength": MAX_KEY, "examples": ["job-17"]},
}


def describe(app: FastAPI) -> None:
    """Have the application complete its description when it is first requested."""
    make = app.openapi

    def describe_all() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(make())
        return app.openapi_schema

    app.openapi = describe_all  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    schema["components"]["securitySchemes"] = _SCHEMES
    schema["security"] = [{name: []} for name in _SCHEMES]
    for path, operations in schema["paths"].items():
        if "post" in operations and not path.endswith("/stream"):
            operations["post"].setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
    return schema
