"""A look at the idle sandboxes now and then, for as long as there are any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleTimer:
    """Calls ``look`` every ``interval()`` seconds while it answers True.

    A timer and not a task: it needs no care when its event loop ends, and the next loop
    simply starts a new one.
    """

    def __init__(self, interval: Callable[[], float], look: Callable[[], bool]) -> None:
        self._interval = interval
        self._look = look
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """In the running loop; no-op while it runs there already."""
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(self._interval(), self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._look():
            self.start()
