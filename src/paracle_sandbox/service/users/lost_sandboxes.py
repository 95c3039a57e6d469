"""Sandboxes that were lost, until an answer has reported that to their user.

A loss counts as told once an answer has carried it: a client that went away does not know. There is
a file for each live sandbox, so that a service that starts knows which ones its predecessor lost.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Loss:
    """The loss of a sandbox's processes and /tmp. Several losses that are not told yet are one."""

    name: str
    told: bool = False


class Losses:
    """The losses and live sandboxes, by the names of the sandboxes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._untold: dict[str, Loss] = {}
        self._live: set[str] = set()

    def start(self) -> None:
        """Note the sandboxes of a predecessor as lost."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            self.note(path.name)

    def note(self, name: str) -> None:
        self._untold.setdefault(name, Loss(name))

    def untold(self, name: str) -> Loss | None:
        return self._untold.get(name)

    def note_made(self, name: str) -> None:
        self._live.add(name)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._directory / name).touch(mode=0o600)
        except OSError as error:
            logger.error("If the service dies, no user learns that %s was lost: %s", name, error)

    def note_removed(self, name: str, *, is_loss: bool) -> None:
        self._live.discard(name)
        if is_loss:
            self.note(name)
        self._forget(name)

    def tell(self, loss: Loss) -> None:
        """Note that an answer has carried the loss."""
        loss.told = True
        if self._untold.get(loss.name) is loss:
            del self._untold[loss.name]
        self._forget(loss.name)

    def _forget(self, name: str) -> None:
        if name in self._live or name in self._untold:
            return
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            logger.error("The loss of %s will be told again: %s", name, error)
