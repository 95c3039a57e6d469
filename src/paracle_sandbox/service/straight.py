"""The straight way to a program, for the requests that come most often.

Finding a route among all, solving what its function needs and unwinding the middlewares takes the
framework longer than the rest of the service takes for a small program. So these requests are
looked at first: one whose user and body are as described is given to the function of its route.
Whatever is odd about one, however little, goes the described way, which knows how to say what.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from .errors import ServiceFault
from .middleware.auth import Message, Receive, Scope, Send
from .routes import sandboxes
from .routes.dependencies import caller_of, parse_json, service_of
from .schemas import ExecuteRequest, ShellRequest
from .users.addresses import user_in

Function = Callable[..., Awaitable[Response]]


class Way(NamedTuple):
    """What a route takes, and its function."""

    shape: type[BaseModel]
    function: Function


# By the last step of an address that is /sandbox/{user_id}/ before it.
_WAYS: dict[str, Way] = {
    "execute": Way(ExecuteRequest, sandboxes.execute),
    "shell": Way(ShellRequest, sandboxes.shell),
}


class Straight:
    """Stands before the framework's application."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        steps = scope["path"].split("/") if _may_be(scope) else []
        if len(steps) != 4 or steps[1] != "sandbox" or steps[3] not in _WAYS:
            await self._app(scope, receive, send)
            return
        way = _WAYS[steps[3]]
        first = await receive()
        scope["app"] = self._app
        request = Request(scope, receive)
        asked = await _asked(request, way.shape, steps[2], first)
        if asked is None:
            await self._app(scope, _again(first, receive), send)
            return
        user, wish = asked
        scope["state"]["user"] = user
        scope["path_params"] = {"user_id": steps[2]}
        try:
            answer = await way.function(request, service_of(request), user, wish)
        except Exception as error:
            kind = next(one for one in type(error).__mro__ if one in self._app.exception_handlers)
            tell = cast(Function, self._app.exception_handlers[kind])
            await (await tell(request, error))(scope, receive, send)
            if kind is Exception:
                raise  # nobody expected it: the server says so too, as it does behind the framework
            return
        await answer(scope, receive, send)


def _may_be(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return kinds == [b"application/json"]


async def _asked(
    request: Request, shape: type[BaseModel], segment: str, first: Message
) -> tuple[str, Any] | None:
    """The user and the wish; None when anything about them is odd, or more of the body follows."""
    if first["type"] != "http.request" or first.get("more_body", False):
        return None
    try:
        user = user_in(segment)
        parser = service_of(request).parser
        wish = await parser.read(
            first.get("body", b""), lambda body: shape.model_validate(parse_json(body))
        )
    except (ValueError, ServiceFault):
        return None
    return (user, wish) if caller_of(request).may_act_for(user) else None


def _again(first: Message, receive: Receive) -> Receive:
    """All messages from the first on, for whoever begins anew."""
    left: list[Message] = [first]

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed
