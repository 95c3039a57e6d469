"""Around each request: who asks is known to all below, and the answer tells of a loss.

Of a sandbox that was made anew, whatever is said about it says so in a header.
"""

from __future__ import annotations

from ..users.lost_sandboxes import Losses
from .auth import App, Message, Receive, Scope, Send
from .caller import ASKER, Asker

HEADER = (b"x-sandbox-recreated", b"true")


class Telling:
    """Wraps the application, inside of what keeps answers: those keep the header too."""

    def __init__(self, app: App, losses: Losses) -> None:
        self._app = app
        self._losses = losses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller = scope["state"]["caller"]
        client = scope.get("client")
        asker = Asker(
            caller.key_id if caller else None,
            client[0] if client else None,
            is_admin=caller is not None and caller.admin,
        )

        async def tell(message: Message) -> None:
            if message["type"] != "http.response.start" or not asker.losses:
                await send(message)
                return
            await send({**message, "headers": [*message.get("headers", []), HEADER]})
            for loss in asker.losses:
                self._losses.tell(loss)

        token = ASKER.set(asker)
        try:
            await self._app(scope, receive, tell)
        finally:
            ASKER.reset(token)
