"""The event loop of the guest: descriptors, timers, nothing else. One thread."""

import itertools
import select
import time
from typing import Callable, Dict, List, Optional, Tuple

READ = select.EPOLLIN
WRITE = select.EPOLLOUT

Handler = Callable[[], None]


class Loop:
    """Calls handlers when their descriptor is ready.

    A handler may be called once too often, when an earlier handler of the same batch closed
    its descriptor and another opened under the number. Descriptors are therefore non-blocking.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: Dict[int, Handler] = {}
        self._timers: List[Tuple[float, int, Handler]] = []
        self._order = itertools.count()

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        # Always before close(): a forked child that still shares the open file would keep it
        # in the epoll set.
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, seconds: float, handler: Handler) -> None:
        # There are few. A heap would be one more library in every sandbox.
        self._timers.append((time.monotonic() + seconds, next(self._order), handler))
        self._timers.sort()

    def run_once(self, block: bool) -> None:
        """Wait for something (not at all when block is false), then handle it."""
        for fd, _ in self._epoll.poll(self._timeout() if block else 0):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        now = time.monotonic() if self._timers else 0.0
        while self._timers and self._timers[0][0] <= now:
            self._timers.pop(0)[2]()

    def _timeout(self) -> Optional[float]:
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())
