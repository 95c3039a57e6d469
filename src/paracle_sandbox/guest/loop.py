"""The event loop of the guest: one thread waits for descriptors and timers and calls handlers.

How it works. The guest (`main.Guest.run`) repeats four steps for as long as the sandbox lives:

1. It gives each job that has more work of its own (a listing, a copy of a tree) one short turn.
2. It sends what the jobs have queued for the host (`wire.Channel.flush`).
3. It calls `run_once`. If no job wants another turn, this waits in epoll. The guest waits only
   there: a handler that blocks would hold up every job.
4. `run_once` calls the handler of each descriptor that is ready, and then of each timer that is
   due, in the order of their times.

The descriptors are the channel, the ends of the programs' pipes and terminals, the pipe through
which SIGCHLD wakes the loop, and the sockets of tunnels. A handler runs to its end before the next
one starts, so jobs need no locks, and each sees the others' state whole. A handler does a bounded
amount of work, at most one chunk of data, so that a job which moves gigabytes does not hold up the
rest.

Jobs use timers to look again after a while, for instance at processes that were killed. A timer
cannot be cancelled: its handler has to find out whether it is still wanted.
"""

import itertools
import select
import time
from typing import Callable, Dict, List, Optional, Tuple

READ = select.EPOLLIN
WRITE = select.EPOLLOUT

Handler = Callable[[], None]


class Loop:
    """Call handlers when their descriptor is ready or their time has come.

    A handler may be called although its descriptor is not ready: an earlier handler of the same
    batch may have closed the descriptor and opened another one that got the same number. All
    descriptors are therefore non-blocking.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: Dict[int, Handler] = {}
        self._timers: List[Tuple[float, int, Handler]] = []
        self._order = itertools.count()

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call the handler whenever the descriptor is ready for these events."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor. Do this before close().

        A forked child that still shares the open file would keep it in the epoll set.
        """
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, seconds: float, handler: Handler) -> None:
        """Call the handler once, after this time."""
        # There are few timers. A heap would be one more module in every sandbox.
        self._timers.append((time.monotonic() + seconds, next(self._order), handler))
        self._timers.sort()

    def run_once(self, block: bool) -> None:
        """Wait for a descriptor or a timer if ``block``; then call the handlers that are due."""
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
