"""The spawner: a privileged process that has sandboxes made, and removes them.

    owner ── control socket ── launcher ── spawner (PID 1 of its own pid namespace)
                                             └── zygote
                                                   ├── parked child, parked child, ...
                                                   └── sandbox, sandbox, ...

It is single-threaded, as is the zygote: parent-death signals name a thread, and a fork of a
threaded process is a lottery. It ends when its owner does, and takes everything with it: being
PID 1, its death is that of every sandbox, and what it leaves on disk (records, cgroups) is
removed by itself or by the next sweep.

Messages are JSON, one a packet; a request carries a number that its answer repeats. None says
what a sandbox is called or whose it is: neither this process nor the zygote, whose memory is in
every later sandbox, holds a secret.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..channel.frames import to_json
from . import kernel
from .child import GO, Child
from .limits.sandbox_resources import Grant, Process
from .resources import Resources
from .shape import Shape
from .steps import StepFailed, Steps
from .warm_pool import WarmPool
from .zygote_client import Zygote

_MAX_MESSAGE = 1 << 16
_BUSY_RETRY_SECONDS = 0.001
_BUSY_PATIENCE_SECONDS = 10.0
_STUCK_RETRY_SECONDS = 1.0
_DIED = b'{"step": "start", "message": "died"}'
_NO_DESCRIPTOR = b'{"step": "start", "message": "the spawner has too many open files"}'
_LEFT = "its processes, or its cgroup, are still there"
_BROKEN = (
    "the host's disk was full, and the kernel gave up the volume of this spawner. Make room in the "
    "directory that PARACLE_DATA_DIR names"
)


class Spawner:
    """The loop and its children. ``resources`` is what they all stand on."""

    def __init__(
        self, control: socket.socket, resources: Resources, zygote: Zygote, options: dict[str, Any]
    ) -> None:
        self._control = control
        self._resources = resources
        self._zygote = zygote
        self._setup: dict[str, Any] = options["setup"]
        self._pool = WarmPool(options)
        self._wanted: dict[str, Any] | None = options["first"]
        self._failpoints: dict[str, str] = options["failpoints"]
        self._steps = Steps(self._failpoints, self._at_failpoint)
        self._owner_fd: int = options["owner_fd"]
        self._children: dict[str, Child] = {}
        self._first: Child | None = None
        self._starting: set[str] = set()  # looking through all children would touch their pages
        self._busy: list[tuple[float, Child]] = []
        # Those that were given up, with something left: tried again from time to time.
        self._stuck: list[Child] = []
        self._stuck_at = 0.0
        self._spare = -1
        self._slots = 0
        self._selector = selectors.DefaultSelector()
        self._ends = False

    def run(self) -> None:
        """Serve until the owner is gone."""
        self._watch(self._control.fileno(), self._on_control)
        self._keep_spare()
        self._watch(self._owner_fd, self._end_soon)
        self._watch(self._zygote.pidfd, self._end_soon)  # all sandboxes died with it
        if self._wanted:
            self._start_first(self._wanted)
        while not self._ends:
            events = self._selector.select(0)
            if not events:
                self._use_idle_time()
                events = self._selector.select(self._patience())
            for key, _ in events:
                key.data()
            if self._pool.in_burst:
                self._resources.keep_alive.beat()
            self._retry_busy()
            self._retry_stuck()
        self._end()

    def _watch(self, fd: int, action: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _patience(self) -> float | None:
        if self._busy:
            return _BUSY_RETRY_SECONDS
        if self._stuck:
            return _STUCK_RETRY_SECONDS
        until_beat = self._resources.keep_alive.until_beat() if self._pool.in_burst else None
        if until_beat is not None:
            return until_beat
        # One child at a time: the end of what starts wakes us.
        return None if self._pool.is_full or self._starting else self._pool.seconds_until_quiet()

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
        self._pool.note_request()
        message = json.loads(packet)
        operations = {"create": self._create, "destroy": self._destroy, "disk": self._disk}
        try:
            operations[message["op"]](message)
        except OSError as error:  # of this request: the others must not suffer for it
            self._answer(message["request"], error="spawner", message=str(error))

    def _end_soon(self) -> None:
        self._ends = True

    def _answer(self, number: int, fds: tuple[int, ...] = (), **answer: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            kernel.send_fds(self._control, [to_json({"request": number, **answer})], fds)

    def _refuse(self, number: int, step: str, message: str) -> None:
        """Answer with an error. ``retire`` tells the owner to start another spawner."""
        retire = self._resources.place.broken
        self._answer(number, error=step, message=message, retire=retire)

    def _create(self, message: dict[str, Any]) -> None:
        if self._resources.place.broken:
            self._refuse(message["request"], "volume", _BROKEN)
            return
        shape = Shape(**message["shape"])
        child = self._take_first(shape) or self._pool.take(shape)
        self._pool.note_create(taken=child is not None)
        if child is None:
            try:
                child = self._start_child(shape, Grant.asked(message))
            except StepFailed as failed:
                self._refuse(message["request"], failed.step, str(failed))
                return
        child.request = message
        if child.state == "parked":
            self._hand_over(child)

    def _start_first(self, wanted: dict[str, Any]) -> None:
        """Begin with the sandbox that we were started for, before the owner can ask for it."""
        with contextlib.suppress(StepFailed):  # then that meets the same step and reports it
            shape, grant = Shape(**wanted["shape"]), Grant.asked(wanted)
            self._first = self._start_child(shape, grant, ahead=True)

    def _take_first(self, shape: Shape) -> Child | None:
        """Take the child of `_start_first`. One that is not finished is handed over when it is."""
        child, self._first = self._first, None
        if child is None or child.state == "dying" or child.has_ended:
            return None
        if child.shape != shape:  # what the owner could not know before
            self._kill(child)
            return None
        return child

    def _destroy(self, message: dict[str, Any]) -> None:
        child = self._children.get(message["slot"])
        if child is None:
            self._answer(message["request"])
            return
        child.waiters.append(message["request"])
        if child in self._stuck:
            self._retry(child)
        else:
            self._kill(child)

    def _disk(self, message: dict[str, Any]) -> None:
        child = self._children.get(message["slot"])
        self._answer(message["request"], **self._resources.disk_answer(child, message["exact"]))

    # -- the way up ----------------------------------------------------------------------

    def _start_child(self, shape: Shape, grant: Grant, *, ahead: bool = False) -> Child:
        resources = self._resources
        self._slots += 1
        slot = resources.records.slot(self._slots)
        child = Child(slot, shape, resources.take_identity(), grant)
        try:
            with self._steps.step("record"):
                resources.records.write(slot, resources.cgroup_paths(slot))
            # Limits that belong to processes, not to a group, would not reach a preforked program.
            at_once = ahead and resources.cgroups is not None
            hurried = self._pool.seconds_until_quiet() > 0
            own = {
                "working_dir": shape.working_dir,
                "preforks_at_once": at_once,
                "hurried": hurried,
            }
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
        self._watch(child.pidfd, lambda: self._on_exit(child))
        self._watch(child.status.fileno(), lambda: self._on_status(child))
        return child

    def _fork(self, child: Child, setup: dict[str, Any]) -> None:
        """Have it forked, and make its groups: first, if it is born there, else meanwhile."""
        place = self._resources.place
        with self._steps.step("fork"):
            if place.is_born_in_group and place.cgroups:
                place.make_groups(child.slot, child.grant.limits, self._steps)
                with place.cgroups.open(child.slot) as group:
                    self._zygote.begin_fork(child, setup, group)
                self._zygote.end_fork(child)
                return
            self._zygote.begin_fork(child, setup)
            try:
                place.make_groups(child.slot, child.grant.limits, self._steps)
            finally:
                self._zygote.end_fork(child)

    def _on_status(self, child: Child) -> None:
        if child.status is None:  # its end was told in the same turn, and read this first
            return
        try:
            packet, fds = kernel.recv_fds(child.status, _MAX_MESSAGE, 1)
        except OSError:
            packet, fds = b"", []
        if fds:
            child.disk_fd = fds[0]
            return
        if packet == b"disk":  # the kernel could not give us the descriptor that came with it
            packet = _NO_DESCRIPTOR
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
            child.failure = json.loads(packet or _DIED)
            if child.request is None and child is not self._first:
                self._pool.give_up()
            self._kill(child)
            return
        if child.request is not None:
            self._hand_over(child)
        else:
            child.state = "parked"
            with contextlib.suppress(OSError):  # it was killed: its end will be noticed
                child.process = self._resources.process_of(child.pidfd)
            if child is not self._first:
                self._pool.children.append(child)

    def _hand_over(self, child: Child) -> None:
        """Give the channel of a finished child to the owner, and to the child what was asked for.

        It has that already, unless it was made ahead of need or cannot have it from a cgroup."""
        request, resources = child.request, self._resources
        assert request is not None and child.host_end is not None
        grant = Grant.asked(request)
        try:
            if grant != child.grant or not resources.cgroups:
                process = Process(child.pid, child.identity)
                resources.place.allow(child.slot, child.shape, grant, self._steps, process)
            with self._steps.step("start"):
                told = child.process or resources.process_of(child.pidfd)
        except StepFailed as failed:
            child.failure = {"step": failed.step, "message": str(failed)}
            self._kill(child)
            return
        try:
            self._answer(
                request["request"],
                (child.host_end.fileno(),),
                slot=child.slot,
                init=told,
                cgroups=resources.cgroup_paths(child.slot),
            )
        except OSError as error:  # too many descriptors are under way, to owners that do not read
            child.failure = {"step": "hand over", "message": str(error)}
            self._kill(child)
            return
        child.state = "running"
        child.request = None
        child.host_end.close()
        child.host_end = None

    # -- the way down --------------------------------------------------------------------

    def _kill(self, child: Child) -> None:
        if child.state != "dying":
            child.state = "dying"
            with contextlib.suppress(ProcessLookupError):
                if child.pidfd >= 0:
                    kernel.send_signal(child.pidfd, signal.SIGKILL)
            self._resources.place.let_die(child.slot)

    def _on_exit(self, child: Child) -> None:
        """Clean up: PID 1 is gone, and with it everything in its pid namespace."""
        self._selector.unregister(child.pidfd)
        while child.status is not None:  # its last words may not have been read yet
            self._on_status(child)
        self._pool.discard(child)
        self._remove(child)

    def _remove(self, child: Child) -> None:
        if self._has_left(child):
            self._clear(child)
        else:
            self._busy.append((time.monotonic() + _BUSY_PATIENCE_SECONDS, child))

    def _has_left(self, child: Child) -> bool:
        return self._resources.place.leave(child.slot) and child.is_gone

    def _retry_busy(self) -> None:
        busy, self._busy = self._busy, []
        for deadline, child in busy:
            if self._has_left(child):
                self._clear(child)
            elif time.monotonic() > deadline:
                self._give_up(child, _LEFT)
            else:
                self._busy.append((deadline, child))

    def _retry_stuck(self) -> None:
        now = time.monotonic()
        if self._stuck and now > self._stuck_at + _STUCK_RETRY_SECONDS:
            self._stuck_at = now
            for child in list(self._stuck):
                self._retry(child)

    def _retry(self, child: Child) -> None:
        """Try again to remove one that was given up, and answer what is left."""
        self._stuck.remove(child)
        if self._has_left(child):
            self._clear(child)
        else:
            self._give_up(child, child.left or _LEFT)

    def _clear(self, child: Child) -> None:
        """Remove its files and its record, now that its processes and groups are gone."""
        try:
            try:
                self._remove_files(child)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                with self._spare_descriptor():
                    self._remove_files(child)
        except OSError as error:  # of this one: the others must not suffer for it
            self._give_up(child, f"its files: {error}")
            return
        self._forget(child)

    def _remove_files(self, child: Child) -> None:
        self._resources.place.clear(child.slot, child.shape)
        self._resources.records.remove(child.slot)

    def _keep_spare(self) -> None:
        """Keep a descriptor to give up when there is no other, so that files can be removed."""
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.dup(self._owner_fd)

    @contextlib.contextmanager
    def _spare_descriptor(self) -> Iterator[None]:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        try:
            yield
        finally:
            self._keep_spare()

    def _give_up(self, child: Child, left: str) -> None:
        """Answer what is left. The child is not forgotten: it is tried again, and until then its
        record stays, so that others, and the next sweep, know of it."""
        child.left = left
        self._children[child.slot] = child
        self._stuck.append(child)
        self._tell(child)

    def _tell(self, child: Child) -> None:
        """Answer the requests for it, and for its end."""
        request, child.request = child.request, None
        if request is not None:
            failure = child.failure or {"step": "start", "message": "the child died"}
            self._refuse(request["request"], failure["step"], failure["message"])
        waiters, child.waiters = child.waiters, []
        for number in waiters:
            self._answer(number, left=child.left)

    def _forget(self, child: Child) -> None:
        child.left = ""
        self._children.pop(child.slot, None)
        if child is self._first:
            self._first = None
        self._starting.discard(child.slot)
        self._resources.give_identity_back(child.identity)
        child.close()
        self._tell(child)

    # -- idle time and end ---------------------------------------------------------------

    def _use_idle_time(self) -> None:
        """No request waits: fill the pool, a step a turn, so that a request never waits long."""
        pool = self._pool
        if self._busy or self._starting or pool.is_full:
            return
        if pool.modules:
            if not pool.seconds_until_quiet():
                self._zygote.preload([pool.modules.pop(0)])
        elif pool.wants_child:
            try:
                self._start_child(pool.shape, pool.grant, ahead=True)
            except StepFailed:
                pool.give_up()

    def _at_failpoint(self, step: str) -> None:
        """Have the owner die here. From this pid namespace it cannot be signalled, so it is asked
        to end itself; nothing goes on before it has."""
        self._control.send(json.dumps({"event": "die", "step": step}).encode())
        select.select([self._owner_fd], [], [], _BUSY_PATIENCE_SECONDS)

    def _end(self) -> None:
        """Remove everything, then end: the owner is gone."""
        for child in list(self._children.values()):
            self._kill(child)
        deadline = time.monotonic() + _BUSY_PATIENCE_SECONDS
        while (self._busy or len(self._children) > len(self._stuck)) and (
            time.monotonic() < deadline
        ):
            for key, _ in self._selector.select(_BUSY_RETRY_SECONDS):
                if key.fd not in (self._control.fileno(), self._owner_fd, self._zygote.pidfd):
                    key.data()
            self._retry_busy()
        for child in list(self._stuck):
            self._retry(child)
        # Of a child that was not removed, the next sweep has to know.
        left = {child.slot for _, child in self._busy}
        self._resources.close(keep=left | set(self._children))
