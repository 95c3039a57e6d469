"""JSON of request bodies and WebSocket messages, parsed strictly, and in a thread if large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from ..errors import BadRequest

MAX_DEPTH = 32
# A larger body is parsed in a thread.
_AT_ONCE = 256 << 10


class StrictRoute(APIRoute):
    """A route that takes only JSON with one meaning: no name twice, no NaN, no deep nesting."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    async def json(self) -> Any:
        parser: JsonParser = self.app.state.service.parser
        return await parser.parse(await self.body())


class JsonParser:
    """Parses small JSON at once, and large JSON in a thread, one text at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "parse")

    async def parse(self, body: bytes) -> Any:
        if len(body) <= _AT_ONCE:
            return parse_json(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse_json, body)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def parse_json(body: bytes | str) -> Any:
    """Parse a JSON text whose size was checked before (``middleware/body_limits``). Raises
    BadRequest and json.JSONDecodeError."""
    try:
        if isinstance(body, bytes):
            body = body.decode("utf-8-sig")  # no other encoding: its quotes are not where we look
        value = json.loads(body, object_pairs_hook=_check_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequest("The JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise BadRequest("The JSON is not UTF-8") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise BadRequest(f"The JSON cannot be read: {error}") from None
    if _is_deeper(value, MAX_DEPTH):
        raise BadRequest("The JSON is nested too deeply")
    return value


def _check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _is_deeper(value: Any, room: int) -> bool:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return room == 0 or any(_is_deeper(item, room - 1) for item in items)
    return False
