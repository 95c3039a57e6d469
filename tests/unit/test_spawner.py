"""What the spawner makes of news that come at the same moment, which no load can be made to hit."""

from __future__ import annotations

import json
import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from paracle_sandbox.jail.cgroups import Limits
from paracle_sandbox.jail.child import Child
from paracle_sandbox.jail.confine import Identity, Shape
from paracle_sandbox.jail.place import Grant
from paracle_sandbox.jail.spawner import Spawner

SHAPE = Shape()
GRANT = {"limits": Limits(64 << 20, 10, 100)._asdict(), "disk_bytes": 1 << 20}


def spawner_on(control: socket.socket) -> Spawner:
    """The real one, where nothing is on disk."""
    place = SimpleNamespace(leave=lambda slot: True, clear=lambda slot, shape: None)
    ground: Any = SimpleNamespace(
        place=place,
        records=SimpleNamespace(remove=lambda slot: None),
        give_identity_back=lambda identity: None,
    )
    mold: Any = SimpleNamespace(reap=lambda pid: os.waitpid(pid, 0))
    options = {
        "setup": {}, "stock": 2, "stock_shape": SHAPE._asdict(), "stock_grant": GRANT,
        "idle_modules": [], "first": None, "failpoints": {}, "owner_fd": -1,
    }  # fmt: skip
    return Spawner(control, ground, mold, options)


def dead_child(last_words: bytes) -> tuple[Child, socket.socket]:
    """One that has said something and ended, none of which was looked at yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    child = Child("slot", SHAPE, Identity(1, 1, False), Grant.asked(GRANT))
    child.pid, child.pidfd, child.status = pid, os.pidfd_open(pid), ours
    ours.setblocking(False)
    if last_words:
        theirs.send(last_words)
    return child, theirs


@pytest.mark.parametrize(
    ("said", "step"),
    [(json.dumps({"step": "seccomp", "message": "refused"}).encode(), "seccomp"), (b"", "start")],
)
def test_an_end_that_is_told_before_the_last_words(said: bytes, step: str) -> None:
    owner, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with owner, control:
        spawner = spawner_on(control)
        child, theirs = dead_child(said)
        child.request = {"request": 7}
        spawner._watch(child.pidfd, lambda: spawner._on_exit(child))
        spawner._watch(child.status.fileno(), lambda: spawner._on_status(child))
        theirs.close()
        # One turn of the loop, in the worse order.
        both = sorted(spawner._selector.select(0), key=lambda key: key[0].fd != child.pidfd)
        assert len(both) == 2
        for key, _ in both:
            key.data()
        answer = json.loads(owner.recv(1 << 16))
        assert (answer["request"], answer["error"]) == (7, step)
