"""The spawner: a privileged process that has sandboxes made, and removes them.

    owner ── control socket ── launcher ── spawner (PID 1 of its own pid namespace)
                                             └── mold
                                                   ├── parked child, parked child, ...
                                                   └── sandbox, sandbox, ...

It is single-threaded, as is the mold: parent-death signals name a thread, and a fork of a
threaded process is a lottery. It ends when its owner does, and takes everything with it: being
PID 1, its death is that of every sandbox, and what it leaves on disk (records, cgroups) is
removed by itself or by the next sweep.

Messages are JSON, one a packet; a request carries a number that its answer repeats. None says
what a sandbox is called or whose it is: neither this process nor the mold, whose memory is in
every later sandbox, holds a secret.
"""

from __future__ import annotations

import contextlib
import json
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from ..channel.frames import to_json
from .child import GO, Child
from .confine import Shape, StepFailed, Steps
from .ground import Ground
from .heat import Heat
from .mold import Mold
from .networks import EndingNetworks
from .place import Grant

_MAX_MESSAGE = 1 << 16
_BUSY_RETRY_SECONDS = 0.001
_BUSY_PATIENCE_SECONDS = 10.0
# The stock is filled while the way into groups is short (`heat`), or when it has been quiet for a
# while: whoever asked for a sandbox is likely to ask again. Who does so at once is not to wait.
_QUIET_SECONDS = 0.03
# While it is not quiet, the processors are left to what is asked for, as long as so many are there.
_LOW_STOCK = 4


class Spawner:
    """The loop and its children. ``ground`` is what they all stand on."""

    def __init__(
        self, control: socket.socket, ground: Ground, mold: Mold, options: dict[str, Any]
    ) -> None:
        self._control = control
        self._ground = ground
        self._mold = mold
        self._setup: dict[str, Any] = options["setup"]
        self._stock_size: int = options["stock"]
        self._stock_shape = Shape(**options["stock_shape"])
        self._stock_grant = Grant.asked(options["stock_grant"])
        self._wanted: dict[str, Any] | None = options["first"]
        self._idle_modules: list[str] = options["idle_modules"]
        self._rehearsed = False
        self._failpoints: dict[str, str] = options["failpoints"]
        self._steps = Steps(self._failpoints, self._at_failpoint)
        self._owner_fd: int = options["owner_fd"]
        self._children: dict[str, Child] = {}
        self._parked: list[Child] = []
        self._first: Child | None = None
        self._starting: set[str] = set()  # looking through all children would touch their pages
        self._busy: list[tuple[float, Child]] = []
        self._slots = 0
        self._quiet_at = 0.0
        self._heat = Heat(ground.cgroups)
        self._networks = EndingNetworks()
        self._selector = selectors.DefaultSelector()
        self._ends = False

    def run(self) -> None:
        """Serve until the owner is gone."""
        self._watch(self._control.fileno(), self._on_control)
        self._watch(self._owner_fd, self._end_soon)
        self._watch(self._mold.pidfd, self._end_soon)  # all sandboxes died with it
        if self._wanted:
            self._start_first(self._wanted)
        while not self._ends:
            events = self._selector.select(0)
            if not events:
                self._use_idle_time()
                events = self._selector.select(self._patience())
            for key, _ in events:
                key.data()
            if time.monotonic() < self._quiet_at:
                self._heat.beat()
            self._retry_busy()
        self._end()

    def _watch(self, fd: int, action: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _patience(self) -> float | None:
        if self._busy:
            return _BUSY_RETRY_SECONDS
        until_quiet = self._quiet_at - time.monotonic()
        if until_quiet > 0 and (until_beat := self._heat.until_beat()) is not None:
            return until_beat
        return max(0.0, until_quiet) if self._networks or self._wants_work() else None

    def _wants_work(self) -> bool:
        """Whether there is something to do ahead of need. One child at a time."""
        if not self._stock_size or self._starting:
            return False
        return not self._mold_ready() or len(self._parked) < self._stock_size

    def _mold_ready(self) -> bool:
        return self._rehearsed and not self._idle_modules

    # -- requests ------------------------------------------------------------------------

    def _on_control(self) -> None:
        try:
            packet = self._control.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._ends = True
            return
        self._quiet_at = time.monotonic() + _QUIET_SECONDS
        message = json.loads(packet)
        operations = {"create": self._create, "destroy": self._destroy, "disk": self._disk}
        operations[message["op"]](message)

    def _end_soon(self) -> None:
        self._ends = True

    def _answer(self, number: int, fds: tuple[int, ...] = (), **answer: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            socket.send_fds(self._control, [to_json({"request": number, **answer})], fds)

    def _create(self, message: dict[str, Any]) -> None:
        shape = Shape(**message["shape"])
        child = self._take_first(shape)
        if child is None and shape == self._stock_shape:
            child = self._take_parked()
        self._heat.asked(to_make=child is None or len(self._parked) < _LOW_STOCK)
        if child is None:
            try:
                child = self._start_child(shape, Grant.asked(message))
            except StepFailed as failed:
                self._answer(message["request"], error=failed.step, message=str(failed))
                return
        child.request = message
        if child.state == "parked":
            self._hand_over(child)

    def _start_first(self, wanted: dict[str, Any]) -> None:
        """The sandbox that we were started for: begin before the owner can ask for it."""
        with contextlib.suppress(StepFailed):  # then that meets the same step and reports it
            shape, grant = Shape(**wanted["shape"]), Grant.asked(wanted)
            self._first = self._start_child(shape, grant, ahead=True)

    def _take_first(self, shape: Shape) -> Child | None:
        """It may not be finished; then it is handed over when it is."""
        child, self._first = self._first, None
        if child is None or child.state == "dying" or child.has_ended:
            return None
        if child.shape != shape:  # what the owner could not know before
            self._kill(child)
            return None
        return child

    def _take_parked(self) -> Child | None:
        """One that lives: what was killed in stock must not be handed out before we notice. The
        last one made: of its memory the most is at hand."""
        while self._parked:
            child = self._parked.pop()
            if not child.has_ended:
                return child
        return None

    def _destroy(self, message: dict[str, Any]) -> None:
        child = self._children.get(message["slot"])
        if child is None:
            self._answer(message["request"])
            return
        child.waiters.append(message["request"])
        self._kill(child)

    def _disk(self, message: dict[str, Any]) -> None:
        child = self._children.get(message["slot"])
        self._answer(message["request"], **self._ground.disk_answer(child, message["exact"]))

    # -- the way up ----------------------------------------------------------------------

    def _start_child(self, shape: Shape, grant: Grant, *, ahead: bool = False) -> Child:
        ground = self._ground
        self._slots += 1
        slot = ground.records.slot(self._slots)
        child = Child(slot, shape, ground.take_identity(), grant)
        try:
            with self._steps.step("record"):
                ground.records.write(slot, ground.cgroup_paths(slot))
            # Limits that belong to processes, not to a group, would not reach a seed.
            seed = ahead and ground.cgroups is not None
            hurried = time.monotonic() < self._quiet_at
            own = {"working_dir": shape.working_dir, "seed": seed, "hurried": hurried}
            self._fork(child, {**self._setup, **own})
        except StepFailed:
            if child.pid:
                self._kill(child)
            self._remove(child)
            raise
        self._children[slot] = child
        self._starting.add(slot)
        assert child.status is not None
        with contextlib.suppress(OSError):  # it was killed: its end will be noticed
            child.status.send(GO)
        self._heat.entering()
        self._watch(child.pidfd, lambda: self._on_exit(child))
        self._watch(child.status.fileno(), lambda: self._on_status(child))
        return child

    def _fork(self, child: Child, setup: dict[str, Any]) -> None:
        """And make its groups: one takes about as long as the other."""
        with self._steps.step("fork"):
            self._mold.begin_fork(child, setup)
            try:
                self._ground.place.make_groups(child.slot, child.grant.limits, self._steps)
            finally:
                self._mold.end_fork(child)

    def _on_status(self, child: Child) -> None:
        if child.status is None:  # its end was told in the same turn, and read this first
            return
        try:
            packet, fds, _, _ = socket.recv_fds(child.status, _MAX_MESSAGE, 1)
        except OSError:
            packet, fds = b"", []
        if fds:
            child.disk_fd = fds[0]
            return
        if packet.startswith(b'{"at"'):
            self._at_failpoint(json.loads(packet)["at"])
            with contextlib.suppress(OSError):  # it was killed while it waited
                child.status.send(b"go on")
            return
        self._selector.unregister(child.status.fileno())
        child.status.close()
        child.status = None
        self._starting.discard(child.slot)
        if packet != b"ok":
            child.failure = json.loads(packet) if packet else {"step": "start", "message": "died"}
            if child.request is None and child is not self._first:
                self._stock_size = 0  # the next request meets the same step and reports it
            self._kill(child)
            return
        self._heat.entered()
        if child.request is not None:
            self._hand_over(child)
        else:
            child.state = "parked"
            with contextlib.suppress(OSError):  # it was killed: its end will be noticed
                child.process = self._ground.process_of(child.pidfd)
            if child is not self._first:
                self._parked.append(child)

    def _hand_over(self, child: Child) -> None:
        """Give the channel of a finished child to the owner, and to the child what was asked for.

        It has that already, unless it was made ahead of need or cannot have it from a cgroup."""
        request, ground = child.request, self._ground
        assert request is not None and child.host_end is not None
        grant = Grant.asked(request)
        try:
            if grant != child.grant or not ground.cgroups:
                ground.place.allow(child.slot, child.shape, grant, self._steps, child.pid)
            with self._steps.step("start"):
                process = child.process or ground.process_of(child.pidfd)
        except StepFailed as failed:
            child.failure = {"step": failed.step, "message": str(failed)}
            self._kill(child)
            return
        child.state = "running"
        child.request = None
        self._answer(
            request["request"],
            (child.host_end.fileno(),),
            slot=child.slot,
            init=process,
            cgroups=ground.cgroup_paths(child.slot),
        )
        child.host_end.close()
        child.host_end = None

    # -- the way down --------------------------------------------------------------------

    def _kill(self, child: Child) -> None:
        if child.state != "dying":
            child.state = "dying"
            self._networks.hold(child.pidfd, child.shape.network)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._ground.place.let_die(child.slot)

    def _on_exit(self, child: Child) -> None:
        """PID 1 is gone, and with it everything in its pid namespace."""
        self._selector.unregister(child.pidfd)
        while child.status is not None:  # its last words may not have been read yet
            self._on_status(child)
        if child in self._parked:
            self._parked.remove(child)
        self._remove(child)

    def _remove(self, child: Child) -> None:
        if self._has_left(child):
            self._forget(child)
        else:
            self._busy.append((time.monotonic() + _BUSY_PATIENCE_SECONDS, child))

    def _has_left(self, child: Child) -> bool:
        return self._ground.place.leave(child.slot) and child.is_gone

    def _retry_busy(self) -> None:
        busy, self._busy = self._busy, []
        for deadline, child in busy:
            if self._has_left(child):
                self._forget(child)
            elif time.monotonic() > deadline:
                self._forget(child, left="its processes, or its cgroup, are still there")
            else:
                self._busy.append((deadline, child))

    def _forget(self, child: Child, left: str = "") -> None:
        ground = self._ground
        try:
            ground.place.clear(child.slot, child.shape)
        except OSError as error:  # of this one: the others must not suffer for it
            left = left or f"its files: {error}"
        ground.records.remove(child.slot)
        self._children.pop(child.slot, None)
        if child is self._first:
            self._first = None
        self._starting.discard(child.slot)
        ground.give_identity_back(child.identity)
        child.close()
        if child.request is not None:
            failure = child.failure or {"step": "start", "message": "the child died"}
            number = child.request["request"]
            self._answer(number, error=failure["step"], message=failure["message"])
        for number in child.waiters:
            self._answer(number, left=left)
        self._networks.let_go()

    # -- idle time and end ---------------------------------------------------------------

    def _use_idle_time(self) -> None:
        """Nothing waits: fill the stock, one child a turn, so that a request never waits long."""
        hot = (self._heat.in_burst or self._heat.lasts) and self._mold_ready()
        quiet = time.monotonic() >= self._quiet_at
        self._networks.let_go(quiet)
        if self._busy or not self._wants_work() or not (hot or quiet):
            return
        if self._idle_modules:
            self._mold.preload([self._idle_modules.pop(0)])
        elif not self._rehearsed:
            self._rehearsed = True
            self._rehearse()
        elif len(self._parked) < (self._stock_size if quiet else _LOW_STOCK):
            try:
                self._start_child(self._stock_shape, self._stock_grant, ahead=True)
            except StepFailed:
                self._stock_size = 0  # the next request meets the same step and reports it

    def _rehearse(self) -> None:
        ground, shape = self._ground, self._stock_shape
        child = Child("rehearsal", shape, ground.take_identity(), self._stock_grant)
        self._mold.rehearse(child, {**self._setup, "working_dir": shape.working_dir})
        ground.give_identity_back(child.identity)

    def _at_failpoint(self, step: str) -> None:
        """Have the owner die here. From this pid namespace it cannot be signalled, so it is asked
        to end itself; nothing goes on before it has."""
        self._control.send(json.dumps({"event": "die", "step": step}).encode())
        select.select([self._owner_fd], [], [], _BUSY_PATIENCE_SECONDS)

    def _end(self) -> None:
        """The owner is gone: remove everything, then ourselves."""
        for child in list(self._children.values()):
            self._kill(child)
        deadline = time.monotonic() + _BUSY_PATIENCE_SECONDS
        while self._children and time.monotonic() < deadline:
            for key, _ in self._selector.select(_BUSY_RETRY_SECONDS):
                if key.fd not in (self._control.fileno(), self._owner_fd, self._mold.pidfd):
                    key.data()
            self._retry_busy()
        self._ground.close()
