"""Who asks: known deep below a request, without being passed through everything on the way.

Tasks that a request starts know it too; those of the service itself have nobody.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from ..users.lost_sandboxes import Loss


@dataclass
class Asker:
    """One request: the key it was sent with, and from where. ``losses`` are what its answer has to
    tell."""

    key_id: str | None = None
    address: str | None = None
    is_admin: bool = False
    losses: set[Loss] = field(default_factory=set)


ASKER: ContextVar[Asker | None] = ContextVar("asker", default=None)


def who() -> dict[str, object]:
    """Who asks now, for the log; empty when it is the service itself."""
    asker = ASKER.get()
    return {} if asker is None else {"key": asker.key_id, "address": asker.address}


def notice(loss: Loss | None) -> None:
    """Whoever asks now is told by the answer, whatever that answer is."""
    asker = ASKER.get()
    if loss is not None and not loss.told and asker is not None:
        asker.losses.add(loss)
