"""When a Python program is forked ahead of need, and for how long it is kept.

A fork takes a millisecond, and as long again until it has its own copies of the pages that every
program writes to. So the next one is forked when somebody is likely to want it, at a moment when
nobody waits for us.
"""

import time
from typing import Any, Callable, Dict, Optional

from ...channel import frames
from ..loop import Loop
from ..processes.oom import OomFirst
from ..processes.process_table import Children
from ..python.program import make_ready
from ..request import parse_python
from ..wire import Wire

REQUEST = (
    b'{"op":"python","path":"/tmp/x/code.py","source":"1","text":"/tmp/x/code.py","argv":[],'
    b'"stdin":false}'
)
# How long a preforked process waits for its program: it holds memory. In a sandbox of the warm
# pool, as long as it is there: so often we look whether our first words were read.
KEEP_SECONDS = 5.0
LOOK_SECONDS = 2.0
# For so long a fork waits for what comes right after a program.
HELD_SECONDS = 0.05
# And as long for whoever gets the result: it would wait for the processor until we have forked.
AFTER_SECONDS = 0.002
# Whoever runs a program so soon after the last will go on like that.
HURRY_SECONDS = 0.02
# Whoever runs so many more in a hurry gets a process that does nothing but fork them.
SERIES_PROGRAMS = 2


class PreforkPolicy:
    """``wanted``: whether `fork` is to be called, when every answer is on its way.
    ``programs``: how many have ended."""

    def __init__(
        self,
        loop: Loop,
        children: "Children[Any]",
        oom: OomFirst,
        setup: Dict[str, Any],
        in_stock: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._children = children
        self._oom = oom
        self._setup = setup
        self._in_stock = in_stock
        self._has_fork_server = bool(setup.get("fork_server", True))
        self._kept_until: Optional[float] = None
        self._after: Optional[Wire] = None
        self._made_ready = False
        self.programs = 0
        self._last_end = 0.0
        self._in_a_row = 0  # of those that hurry
        self._hurried = bool(setup.get("hurried"))
        self.wanted = bool(setup.get("preforks_at_once"))

    def fork(self, rehearse_command: Callable[[], None]) -> None:
        """Fork the next program, then write to the pages that starting it will write to.

        We are a fork, and were forked just now: the first write to each page copies it, and a
        command touches hundreds. Where programs hurry, there is no moment for that.
        """
        self.wanted = False
        self._keep()
        in_series = self._has_fork_server and self._in_a_row >= SERIES_PROGRAMS
        if in_series and self._children.prefork_in_series():
            return
        likely = None
        if not self._hurried or in_series or (self.programs and not self._made_ready):
            likely = self._likely_program()
        with self._oom:
            self._children.prefork(None if self._hurried else likely)
            if in_series and likely is not None:
                self._children.have_fork_server(likely)  # for those that come after the next
        if self._hurried and self.programs:
            return
        try:
            rehearse_command()
        except OSError:
            pass  # the next command will say so, if it lasts

    def _likely_program(self) -> Dict[str, Any]:
        program = parse_python(frames.decode_json(REQUEST), self._setup).program
        assert program
        make_ready(program["env"], program["python"])
        self._made_ready = True
        return program

    def program_started(self, request: Dict[str, Any]) -> None:
        pause = time.monotonic() - self._last_end
        self._hurried = pause < HURRY_SECONDS
        spared = request.get("few_processes")  # each of ours is one less for the program
        self._in_a_row = self._in_a_row + 1 if self._hurried and not spared else 0
        if self._hurried:
            self.wanted = True  # for the next, while this one runs

    def program_ended(self, after: Optional[Wire]) -> None:
        """after: that of what was asked for along with the program, and comes first if that does
        not take long."""
        self.programs += 1
        self._last_end = time.monotonic()
        # Whoever ran two will run a third; many sandboxes are made for a single program.
        if self.programs < 2 or self._children.has_preforked:
            return
        self._hurried = False
        self._after = after
        self._loop.call_later(AFTER_SECONDS if after is None else HELD_SECONDS, self._want)

    def stream_ended(self, wire: Wire) -> None:
        if wire is self._after:
            self._after = None
            self._want()

    def _want(self) -> None:
        self.wanted = not self._children.has_preforked

    def _keep(self) -> None:
        """For a while, from now on."""
        if self._kept_until is None:
            self._loop.call_later(LOOK_SECONDS, self._waited)
        self._kept_until = time.monotonic() + KEEP_SECONDS

    def _waited(self) -> None:
        assert self._kept_until is not None
        if not self.programs and self._children.has_preforked and self._in_stock():
            self._kept_until = time.monotonic() + KEEP_SECONDS
        left = self._kept_until - time.monotonic()
        if left > 0:
            self._loop.call_later(min(left, LOOK_SECONDS), self._waited)
            return
        self._kept_until = None
        self._children.drop_preforked()
