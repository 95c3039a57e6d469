"""Killing a command with everything it ever started, and nothing else.

A keeper is the reaper of all its descendants, however often they forked or called setsid, so
they are found by walking down from it in /proc. A walk is not a snapshot: processes fork,
die and change parents meanwhile. So whole process groups go first (the kernel signals a group
atomically against fork), then each process, and then we look again, until a look that can be
trusted finds nothing. Then the keeper goes as well, and what it had forked at that very
moment becomes a child of the guest: no keeper, hence an orphan, hence killed.
"""

import os
import signal
import time
from typing import Callable, Container, Dict, List, NamedTuple, Optional

from .loop import Loop

DEADLINE_SECONDS = 2.0
LOOKS_PER_ROUND = 4
FIRST_PAUSE_SECONDS = 0.0005
LONGEST_PAUSE_SECONDS = 0.05


class Process(NamedTuple):
    parent: int
    group: int
    alive: bool


class Walk(NamedTuple):
    processes: Dict[int, Process]
    trusted: bool  # nothing vanished or changed parents while we looked


def walk() -> Walk:
    """Every process that /proc shows."""
    processes: Dict[int, Process] = {}
    trusted = True
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb", buffering=0) as file:
                    processes[int(name)] = parse_stat(file.read(1024))
            except OSError:  # it has ended meanwhile, or we are out of descriptors
                trusted = False
    if trusted:
        trusted = all(p.parent in processes or p.parent == 0 for p in processes.values())
    return Walk(processes, trusted)


def parse_stat(text: bytes) -> Process:
    # The name before the last parenthesis is chosen by the process: it may contain anything.
    fields = text[text.rindex(b")") + 2 :].split()
    dead = fields[0] in (b"Z", b"X")
    # A main thread that ended while others run is shown as a zombie with threads.
    alive = not dead or int(fields[17]) > 1
    return Process(int(fields[1]), int(fields[2]), alive)


def doomed(
    processes: Dict[int, Process], guest: int, keepers: Container[int], keeper: Optional[int]
) -> List[int]:
    """Living descendants of the keeper and of every orphan; never a keeper."""
    children: Dict[int, List[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found = [pid for pid in children.get(guest, ()) if pid not in keepers]
    if keeper is not None and keeper in keepers:
        found += children.get(keeper, ())
    for pid in found:  # grows while we go down
        found += children.get(pid, ())
    return [pid for pid in found if processes[pid].alive]


def strike(processes: Dict[int, Process], targets: List[int], own_group: int) -> None:
    """SIGKILL the groups of the targets, then the targets."""
    # A group lies within one session, and each command starts its own: a target's group has
    # no member of another command. Ours is the exception, before the child has left it.
    for group in {processes[pid].group for pid in targets} - {0, own_group}:
        _kill(-group)
    for pid in targets:
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # gone already, or not ours to kill: the next look will tell


class TreeKill:
    """One kill in progress: short rounds, with the loop running in between."""

    def __init__(
        self,
        loop: Loop,
        keepers: Container[int],
        keeper: Optional[int],
        done: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._keepers = keepers
        self._keeper = keeper
        self._done = done
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._pause = FIRST_PAUSE_SECONDS

    def round(self) -> None:
        """Calls done with the number of survivors, now or in a later round."""
        survivors = self._look_and_strike()
        if survivors == 0:
            if self._keeper is None or self._keeper not in self._keepers:
                self._done(0)
                return
            _kill(self._keeper)
        if time.monotonic() >= self._deadline:
            self._done(max(0, survivors))
            return
        self._loop.call_later(self._pause, self.round)
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)

    def _look_and_strike(self) -> int:
        """How many were alive at the last look; -1 when it saw none but cannot be trusted."""
        targets: List[int] = []
        for _ in range(LOOKS_PER_ROUND):
            processes, trusted = walk()
            targets = doomed(processes, os.getpid(), self._keepers, self._keeper)
            if targets:
                strike(processes, targets, os.getpgrp())
            elif trusted:
                return 0
        return len(targets) or -1


def kill_everything() -> None:
    """The end of the sandbox: blocks until nothing that we started is left, or gives up."""
    if os.getpid() == 1:
        _kill(-1)
        return
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        processes, trusted = walk()
        targets = doomed(processes, os.getpid(), (), None)
        if targets:
            strike(processes, targets, os.getpgrp())
        elif trusted:
            return
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass
