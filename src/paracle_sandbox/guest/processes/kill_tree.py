"""Killing a command with everything it ever started, and nothing else.

A keeper is the reaper of all its descendants, however often they forked or called setsid, so
they are found by walking down from it in /proc. A walk is not a snapshot: processes fork,
die and change parents meanwhile. /proc lists pids in order, so parents mostly come before
their children, and each process is killed when it is met, its whole group first (the kernel
signals a group atomically against fork): a fork bomb is overtaken from behind. Walks follow
until one that can be trusted finds nothing. Then the keeper goes as well. The direct command
has no keeper: its processes are those that no keeper is above (see children).

Programs run as our own user and may hinder us: they may take our descriptors away (prlimit), so
that /proc cannot be read, or fork and exit faster than a walk reads. So nothing but a trusted
walk, or the kernel's word that we have no children, is taken for the end of a tree. When walks
fail for half a second, processes are stopped while they are counted; when they cannot be read
at all, everything in the sandbox is killed. What then still cannot be proven to be gone is
reported as a survivor, which costs the sandbox.
"""

import os
import signal
import time
from typing import (
    Any,
    Callable,
    Container,
    Dict,
    FrozenSet,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

from ..loop import Loop
from .process_table import Children

DEADLINE_SECONDS = 2.0
# For so long walks are repeated before other commands are made to suffer for it.
PATIENCE_SECONDS = 0.5
FIRST_PAUSE_SECONDS = 0.0005
LONGEST_PAUSE_SECONDS = 0.05


class Process(NamedTuple):
    parent: int
    group: int
    alive: bool
    start: bytes


def read_process(pid: int) -> Process:
    """Raises OSError when it is gone."""
    fd = os.open("/proc/%d/stat" % pid, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return parse_stat(os.read(fd, 1024))
    finally:
        os.close(fd)


def parse_stat(text: bytes) -> Process:
    # The name before the last parenthesis is chosen by the process: it may contain anything.
    fields = text[text.rindex(b")") + 2 :].split()
    dead = fields[0] in (b"Z", b"X")
    # A main thread that ended while others run is shown as a zombie with threads.
    alive = not dead or int(fields[17]) > 1
    return Process(int(fields[1]), int(fields[2]), alive, fields[19])


class Walk:
    """One pass over /proc that kills the descendants of the keeper, or what has no keeper.

    found: those that were alive. trusted: nothing ended or changed parents while we looked.
    blind: a process, or all of them, could not be looked at, though it may be there.
    dead: those of the tree that have ended and were not reaped. ``known_dead``: as another walk
    found them, which ended before this one. Who has died since may have left a child, born too
    late to be in the list that we read.
    """

    def __init__(
        self,
        children: Container[int],
        keeper: Optional[int],
        known_dead: FrozenSet[Tuple[int, bytes]] = frozenset(),
    ) -> None:
        self.found: List[int] = []
        self.dead: Set[Tuple[int, bytes]] = set()
        self._known_dead = known_dead
        self.trusted = True
        self.blind = False
        self._guest = os.getpid()
        self._children = children
        self._orphans_too = keeper is None
        self._doomed: Set[int] = set()
        if keeper is not None and keeper in children:
            self._doomed.add(keeper)
        # A group lies within one session, and each command starts its own: no group has
        # members of two commands. Ours is the exception, before a child has left it.
        self._groups_done = {0, os.getpgrp()}

    def run(self) -> None:
        """Raises nothing: whatever goes wrong, /proc was not seen."""
        try:
            with _Hurry():
                self._run()
        except Exception:  # noqa: BLE001  an error that got out would be taken for an end
            self.blind = True
        if self.blind:
            self.trusted = False

    def _run(self) -> None:
        later: Dict[int, Process] = {}
        known = {0}
        with os.scandir("/proc") as entries:
            for entry in entries:
                if not entry.name.isdigit():
                    continue
                pid = int(entry.name)
                try:
                    process = read_process(pid)
                except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    self.trusted = False
                    continue
                except OSError:  # we are out of descriptors, or of memory
                    self.blind = True
                    continue
                known.add(pid)
                if not self._meet(pid, process):
                    later[pid] = process
        self._meet_again(later)
        self.trusted = self.trusted and all(p.parent in known for p in later.values())

    def _meet_again(self, later: Dict[int, Process]) -> None:
        """Children with a smaller pid than their parent: numbers had wrapped around."""
        again = True
        while again:
            hits = [pid for pid, process in later.items() if self._meet(pid, process)]
            for pid in hits:
                del later[pid]
            again = bool(hits)

    def _meet(self, pid: int, process: Process) -> bool:
        if process.parent == self._guest:
            condemned = self._orphans_too and pid not in self._children
        else:
            condemned = process.parent in self._doomed
        if not condemned:
            return False
        self._doomed.add(pid)
        if not process.alive:
            self.dead.add((pid, process.start))
            # A child of ours is not gone before the loop has reaped it.
            if process.parent == self._guest or (pid, process.start) not in self._known_dead:
                self.trusted = False
        if process.alive:
            self.found.append(pid)
            if process.group not in self._groups_done:
                self._groups_done.add(process.group)
                _kill(-process.group)
            _kill(pid)
        return True


class _Hurry:
    """Where it is allowed, go first: a bomb of hundreds leaves us hardly any processor time.

    For the length of a walk, a few milliseconds of work. It takes CAP_SYS_NICE, or RLIMIT_RTPRIO
    or RLIMIT_NICE of the guest, which keepers give up.
    """

    def __enter__(self) -> None:
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._set(os.SCHED_RR, 1, -20)

    def __exit__(self, *_: object) -> None:
        self._set(os.SCHED_OTHER, 0, self._nice)

    def _set(self, policy: int, priority: int, nice: int) -> None:
        # The first is worth more, above all with autogroups; the second is allowed more often.
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError:
            pass
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError:
            pass


def send_signal(pid: int, number: int) -> None:
    """To the group of a command. Raises ProcessLookupError, PermissionError."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # a fork that has not come to its own group yet


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # gone already, or not ours to kill: the next walk will tell


def _has_children() -> bool:
    """Asked of the kernel without a descriptor. Of the first process everything is a descendant,
    so what has no children is alone. Those that have ended are left for the loop to reap."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class TreeKill:
    """One kill in progress: walks, with the loop running in between.

    Of the tree below a keeper; without one, of everything that has none: the direct command's.
    """

    def __init__(
        self,
        loop: Loop,
        children: Children[Any],
        keeper: Optional[int],
        done: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._children = children
        self._keeper = keeper
        self._done = done
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._pause = FIRST_PAUSE_SECONDS
        self._struck: Set[int] = set()
        self._dead: FrozenSet[Tuple[int, bytes]] = frozenset()
        self._is_first_process = os.getpid() == 1
        if keeper is None:
            children.begin_hunt()

    def round(self) -> None:
        """Calls done with the number of survivors, now or in a later round."""
        patient = time.monotonic() < self._deadline - DEADLINE_SECONDS + PATIENCE_SECONDS
        if self._is_first_process and self._children.alone(self._keeper):
            strike_all(self._children)
        walk = self._walk(still=not patient)
        if walk.blind and self._is_first_process and not patient:
            strike_all(self._children)
        if walk.blind and self._is_first_process and not _has_children():
            self._finish(0)
            return
        if not walk.found and walk.trusted:
            if self._keeper is None or self._keeper not in self._children:
                self._finish(0)
                return
            self._children.end_keeper(self._keeper)
            _kill(self._keeper)
        if time.monotonic() >= self._deadline:
            # Among the processes of a whole machine, as in tests, somebody always comes or goes.
            unproven = walk.blind or (self._is_first_process and not walk.trusted)
            self._finish(max(len(walk.found), int(unproven)))
            return
        self._loop.call_later(self._pause_after(walk.found), self.round)

    def _walk(self, still: bool) -> Walk:
        """``still``: stop everything meanwhile, so that nothing can fork and exit past us."""
        walk = Walk(self._children, self._keeper, self._dead)
        still = still and self._is_first_process
        if still:
            _kill(-1, signal.SIGSTOP)
        try:
            walk.run()
        finally:
            if still:
                _kill(-1, signal.SIGCONT)
        self._dead = frozenset(walk.dead)
        return walk

    def _finish(self, survivors: int) -> None:
        if self._keeper is None:
            self._children.end_hunt()
        self._done(survivors)

    def _pause_after(self, found: List[int]) -> float:
        """None while new ones appear; a growing one for the dying to die."""
        if self._struck.issuperset(found):
            self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
            return self._pause
        self._struck.update(found)
        return 0


def strike_all(children: Children[Any]) -> None:
    """Kill all processes but the guest with one system call. Only the first process may."""
    _kill(-1)
    children.drop_preforked()  # it dies too, and must not get a program meanwhile


def kill_everything() -> None:
    """The end of the sandbox: blocks until nothing that we started is left, or gives up."""
    if os.getpid() == 1:
        _kill(-1)
        return
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        walk = Walk(children=(), keeper=None)
        walk.run()
        if not walk.found and walk.trusted:
            return
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass
