"""Kill a command with all processes that it ever started, and no others.

A keeper is the reaper of all its descendants, however often they forked or called setsid. So they
are found by walking down from it in /proc. A walk is not a snapshot: processes fork, die and change
parents meanwhile. /proc lists pids in order, so parents mostly come before their children. The walk
kills each process when it meets it, the whole process group first, because the kernel signals a
group atomically against fork: so it overtakes a fork bomb. Walks are repeated until one that can be
trusted finds nothing. Then the keeper is killed, too. The direct command has no keeper: its
processes are those without a keeper above them (see `process_table`).

Programs run as our own user and may hinder us: they may take our descriptors away (prlimit), so
that /proc cannot be read, or fork and exit faster than a walk reads. So only two things prove the
end of a tree: a trusted walk that finds nothing, or the kernel's answer that we have no children.
When walks fail for half a second, processes are stopped while they are counted. When /proc cannot
be read at all, every process in the sandbox is killed. A process that then still cannot be proven
to have ended is reported as a survivor, and the host destroys the sandbox.
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
# Walks are repeated for so long before they stop the processes of other commands.
PATIENCE_SECONDS = 0.5
FIRST_PAUSE_SECONDS = 0.0005
LONGEST_PAUSE_SECONDS = 0.05


class Process(NamedTuple):
    """The fields of /proc/PID/stat that a walk needs."""

    parent: int
    group: int
    alive: bool
    start: bytes


def read_process(pid: int) -> Process:
    """Read the state of a process. Raises OSError if it has ended."""
    fd = os.open("/proc/%d/stat" % pid, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return parse_stat(os.read(fd, 1024))
    finally:
        os.close(fd)


def parse_stat(text: bytes) -> Process:
    """Parse the content of /proc/PID/stat."""
    # The process chooses the name before the last parenthesis, which may contain anything.
    fields = text[text.rindex(b")") + 2 :].split()
    dead = fields[0] in (b"Z", b"X")
    # If the main thread has ended and others run, the process is shown as a zombie with threads.
    alive = not dead or int(fields[17]) > 1
    return Process(int(fields[1]), int(fields[2]), alive, fields[19])


class Walk:
    """One pass over /proc that kills the descendants of a keeper, or processes without a keeper.

    ``found`` has the processes that were alive. ``trusted`` says that no process ended or changed
    its parent during the pass. ``blind`` says that /proc, or a process in it, could not be read.
    ``dead`` has the processes of the tree that have ended and were not reaped; ``known_dead`` has
    those of an earlier walk. A process that died since that walk may have left a child that was
    born too late to be in the list that this walk reads.
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
        # A group lies within one session, and each command starts a session: no group has members
        # of two commands. Our own group is the exception, before a child has left it.
        self._groups_done = {0, os.getpgrp()}

    def run(self) -> None:
        """Do the walk. It raises nothing: an error makes the walk blind."""
        try:
            with _Hurry():
                self._run()
        except Exception:  # noqa: BLE001  outside, an error would be taken for the end of the tree
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
        """Find the children that have a smaller pid than their parent, after pids wrapped
        around."""
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
            # A child of ours has not ended before the loop has reaped it.
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
    """Raise our priority for a walk, if allowed: a fork bomb leaves us hardly any processor time.

    A walk is a few milliseconds of work. This needs CAP_SYS_NICE, or RLIMIT_RTPRIO or RLIMIT_NICE,
    which the guest has and keepers give up.
    """

    def __enter__(self) -> None:
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._set(os.SCHED_RR, 1, -20)

    def __exit__(self, *_: object) -> None:
        self._set(os.SCHED_OTHER, 0, self._nice)

    def _set(self, policy: int, priority: int, nice: int) -> None:
        # The first call helps more, above all with autogroups; the second is allowed more often.
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError:
            pass
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError:
            pass


def send_signal(pid: int, number: int) -> None:
    """Signal the process group of a command. Raises ProcessLookupError, PermissionError."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # the fork has not created its own group yet


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, or we may not kill it: the next walk finds out


def _has_children() -> bool:
    """Ask the kernel whether we have children, which needs no descriptor.

    All processes of the sandbox descend from its first one: if that has no children, it is alone.
    Children that have ended are left for the loop to reap.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class TreeKill:
    """One kill in progress: walks, with the loop running in between.

    It kills the tree below a keeper or, without one, the processes of the direct command.
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
        """Walk once. Calls ``done`` with the number of survivors, in this round or a later one."""
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
            # If we see the processes of a whole machine, as in tests, some always come and go.
            unproven = walk.blind or (self._is_first_process and not walk.trusted)
            self._finish(max(len(walk.found), int(unproven)))
            return
        self._loop.call_later(self._pause_after(walk.found), self.round)

    def _walk(self, still: bool) -> Walk:
        """Do one walk.

        With ``still``, all processes are stopped meanwhile and cannot fork or exit.
        """
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
        """Return 0 while new processes appear, else a growing pause in which the dying can end."""
        if self._struck.issuperset(found):
            self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
            return self._pause
        self._struck.update(found)
        return 0


def strike_all(children: Children[Any]) -> None:
    """Kill all processes but the guest with one system call. Only the first process may do this."""
    _kill(-1)
    children.drop_preforked()  # it dies, too, and must not get a program meanwhile


def kill_everything() -> None:
    """Kill all processes that we started, at the end of the sandbox. Blocks until they have ended.

    After DEADLINE_SECONDS it gives up.
    """
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
