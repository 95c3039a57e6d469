"""Middleware: keeps in a context variable who sent the current request, for the audit log, and adds
``X-Sandbox-Recreated: true`` to the first answer after a sandbox was lost.

Tasks that a request starts inherit the variable. Tasks of the service itself have none.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..users.lost_sandboxes import Loss, Losses

HEADER = (b"x-sandbox-recreated", b"true")


@dataclass
class Sender:
    """One request's key and address. ``losses`` are the lost sandboxes that its answer reports."""

    key_id: str | None = None
    address: str | None = None
    is_admin: bool = False
    losses: set[Loss] = field(default_factory=set)


SENDER: ContextVar[Sender | None] = ContextVar("sender", default=None)


def describe_sender() -> dict[str, object]:
    """Return the current request's key and address, for the log; nothing in a service task."""
    sender = SENDER.get()
    return {} if sender is None else {"key": sender.key_id, "address": sender.address}


def report_loss(loss: Loss | None) -> None:
    """Have the answer to the current request report this loss, whatever the answer is."""
    sender = SENDER.get()
    if loss is not None and not loss.told and sender is not None:
        sender.losses.add(loss)


class RequestContext:
    """Wraps the application inside of Idempotency, whose stored answers have the header, too."""

    def __init__(self, app: ASGIApp, losses: Losses) -> None:
        self._app = app
        self._losses = losses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller = scope["state"]["caller"]
        client = scope.get("client")
        sender = Sender(
            caller.key_id if caller else None,
            client[0] if client else None,
            is_admin=caller is not None and caller.admin,
        )

        async def send_with_losses(message: Message) -> None:
            if message["type"] != "http.response.start" or not sender.losses:
                await send(message)
                return
            await send({**message, "headers": [*message.get("headers", []), HEADER]})
            for loss in sender.losses:
                self._losses.tell(loss)

        token = SENDER.set(sender)
        try:
            await self._app(scope, receive, send_with_losses)
        finally:
            SENDER.reset(token)
