"""Tests of how the spawner handles events that come at the same moment, which no load can
provoke."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paracle_sandbox.jail import spawner as spawner_module
from paracle_sandbox.jail import warm_pool
from paracle_sandbox.jail.child import Child
from paracle_sandbox.jail.limits.cgroups import Limits
from paracle_sandbox.jail.limits.sandbox_resources import Grant
from paracle_sandbox.jail.shape import Identity, Shape
from paracle_sandbox.jail.spawner import Spawner

SHAPE = Shape()
GRANT = {"limits": Limits(64 << 20, 10, 100)._asdict(), "disk_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def who_has_ended_is_gone():
    """As in a zygote."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture(autouse=True)
def no_spawner_is_left():
    yield
    while _spawners:
        _spawners.pop()._selector.close()


_spawners: list[Spawner] = []


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def spawner_on(control: socket.socket) -> Spawner:
    """Provide the real spawner, without files on disk."""
    place = SimpleNamespace(
        make_groups=lambda *_: None,
        let_die=lambda slot: None,
        leave=lambda slot: True,
        clear=lambda slot, shape: None,
        broken=False,
        is_born_in_group=False,
    )
    resources: Any = SimpleNamespace(
        place=place,
        records=SimpleNamespace(remove=lambda slot: None),
        give_identity_back=lambda identity: None,
    )
    resources.cgroups = None
    zygote: Any = SimpleNamespace()
    options = {
        "setup": {}, "stock": 2, "stock_shape": SHAPE._asdict(), "stock_grant": GRANT,
        "idle_modules": [], "first": None, "failpoints": {}, "owner_fd": -1, "keep_alive": True,
    }  # fmt: skip
    _spawners.append(Spawner(control, resources, zygote, options))
    return _spawners[-1]


def dead_child(last_words: bytes) -> tuple[Child, socket.socket]:
    """Return a child that has reported and ended, while the spawner has not looked at either
    yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waits, go = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        go.close()
        waits.recv(1)
        os._exit(0)
    waits.close()
    child = Child("slot", SHAPE, Identity(1, 1, False), Grant.asked(GRANT))
    child.pid, child.pidfd, child.status = pid, os.pidfd_open(pid), ours
    go.close()
    until(lambda: child.is_gone)
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


class _Zygote:
    """A zygote that forks nothing: a child is a process of ours that waits to be killed."""

    def __init__(self) -> None:
        self.forked: list[tuple[Child, socket.socket]] = []

    def begin_fork(self, child: Child, setup: dict[str, Any]) -> None:
        child.status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child.host_end, guest_end = socket.socketpair()
        guest_end.close()
        child.pid = os.fork()
        if child.pid == 0:
            signal.pause()
        child.pidfd = os.pidfd_open(child.pid)
        child.status.setblocking(False)
        self.forked.append((child, theirs))

    def end_fork(self, child: Child) -> None:
        pass


def turn(spawner: Spawner) -> None:
    for key, _ in spawner._selector.select(30):
        key.data()


@pytest.fixture
def started():
    """Start a spawner with the sandbox that it was started for.

    Returns it, its owner's end, and its zygote.
    """
    owner, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    spawner, zygote = spawner_on(control), _Zygote()
    resources: Any = spawner._resources
    resources.instance, resources.volume = 0, None
    resources.cgroups = SimpleNamespace(version=1)
    resources.take_identity = lambda: Identity(1, 1, False)
    resources.cgroup_paths = lambda slot: {}
    resources.process_of = lambda pidfd: {}
    resources.records.slot = lambda number: f"slot-0-{number}"
    resources.records.write = lambda slot, groups: None
    spawner._zygote = zygote  # type: ignore[assignment]
    spawner._start_first({"shape": SHAPE._asdict(), **GRANT})
    yield spawner, owner, zygote
    for child, theirs in zygote.forked:
        if child.pidfd >= 0:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        child.close()
        theirs.close()
    owner.close()
    control.close()


def asked(number: int, shape: Shape = SHAPE) -> dict[str, Any]:
    return {"request": number, "shape": shape._asdict(), **GRANT}


def answer_to(owner: socket.socket) -> dict[str, Any]:
    packet, fds, _, _ = socket.recv_fds(owner, 1 << 16, 1)
    for fd in fds:
        os.close(fd)
    return {**json.loads(packet), "fds": len(fds)}


@pytest.mark.parametrize("finished", [True, False], ids=["parked", "starting"])
def test_the_first_is_handed_over_once_whenever_it_is_asked_for(started, finished: bool) -> None:
    spawner, owner, zygote = started
    ((_, theirs),) = zygote.forked
    if finished:
        theirs.send(b"ok")
        turn(spawner)
    spawner._create(asked(1))
    if not finished:
        theirs.send(b"ok")
        turn(spawner)
    answer = answer_to(owner)
    assert (answer["request"], answer["slot"], answer["fds"]) == (1, "slot-0-1", 1)
    spawner._create(asked(2))
    assert [child.slot for child, _ in zygote.forked] == ["slot-0-1", "slot-0-2"]


def test_one_that_is_gone_before_it_is_handed_over_is_an_error_and_no_end(started) -> None:
    spawner, owner, zygote = started
    ((child, theirs),) = zygote.forked

    def nobody(_pidfd: int) -> dict[str, int]:
        raise ProcessLookupError(3, "the child died")

    spawner._resources.process_of = nobody
    spawner._create(asked(1))
    theirs.send(b"ok")
    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
    until(lambda: child.is_gone)
    while spawner._children:
        turn(spawner)
    answer = answer_to(owner)
    assert (answer["request"], answer["error"], answer["fds"]) == (1, "start", 0)
    assert "the child died" in answer["message"]


@pytest.mark.parametrize(("left", "is_burst"), [(4, False), (3, True)])
def test_it_is_a_burst_once_few_are_left(
    started, monkeypatch: pytest.MonkeyPatch, left: int, is_burst: bool
) -> None:
    spawner, _, _ = started
    spawner._first = None
    ready = [SimpleNamespace(has_ended=False, state="parked")] * (left + 2)
    spawner._pool.children.extend(ready)  # type: ignore[arg-type]
    monkeypatch.setattr(spawner, "_hand_over", lambda child: None)
    monkeypatch.setattr(warm_pool, "_BURST_SECONDS", 60.0)
    for number in range(1, 3):
        assert not spawner._pool.in_burst
        spawner._create(asked(number))
    assert (len(spawner._pool.children), spawner._pool.in_burst) == (left, is_burst)


def test_what_others_call_it_is_known_before_it_is_asked_for(started) -> None:
    spawner, owner, zygote = started
    ((_, theirs),) = zygote.forked
    looks: list[int] = []
    spawner._resources.process_of = lambda pidfd: {"pid": looks.append(pidfd) or 7, "start": 8}
    theirs.send(b"ok")
    turn(spawner)
    assert looks
    spawner._create(asked(1))
    assert answer_to(owner)["init"] == {"pid": 7, "start": 8}
    assert len(looks) == 1


def test_one_that_died_before_it_could_be_looked_at_is_noticed(started) -> None:
    spawner, _, zygote = started
    ((child, theirs),) = zygote.forked

    def gone(_pidfd: int) -> dict[str, int]:
        raise FileNotFoundError("-1/stat")

    spawner._resources.process_of = gone
    theirs.send(b"ok")
    turn(spawner)
    assert (child.state, child.process) == ("parked", None)


def test_a_first_of_another_shape_goes(started) -> None:
    spawner, _, zygote = started
    spawner._create(asked(1, Shape(working_dir="/data")))
    first, second = (child for child, _ in zygote.forked)
    assert (first.state, second.shape.working_dir) == ("dying", "/data")
    while first.pidfd >= 0:
        turn(spawner)
    assert list(spawner._children) == ["slot-0-2"]


def test_a_first_that_failed_is_made_again_when_it_is_asked_for(started) -> None:
    spawner, _, zygote = started
    ((first, theirs),) = zygote.forked
    theirs.send(json.dumps({"step": "seccomp", "message": "refused"}).encode())
    while first.pidfd >= 0:
        turn(spawner)
    spawner._create(asked(1))
    assert [child.slot for child, _ in zygote.forked] == ["slot-0-1", "slot-0-2"]


def test_a_stock_is_filled_for_whoever_asks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled only while no request would have to wait for it, unless it would be used up."""
    owner, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with owner, control:
        spawner = spawner_on(control)
        spawner._pool._quiet_at = float("inf")
        begun: list[Shape] = []
        monkeypatch.setattr(spawner, "_start_child", lambda shape, *_, **__: begun.append(shape))
        spawner._pool.note_create(taken=False)
        spawner._use_idle_time()
        assert not begun
        spawner._pool.note_create(taken=False)
        spawner._use_idle_time()
        assert begun == [SHAPE]


@pytest.mark.parametrize(
    ("parked", "quiet", "fills"), [(4, False, False), (3, False, True), (4, True, True)]
)
def test_a_deep_stock_is_filled_after_a_burst(
    monkeypatch: pytest.MonkeyPatch, parked: int, quiet: bool, fills: bool
) -> None:
    """During the burst, requests have the processors: filling would make each of them wait."""
    owner, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with owner, control:
        spawner = spawner_on(control)
        spawner._pool._quiet_at = float("-inf" if quiet else "inf")
        spawner._pool.size = 10
        spawner._pool.children.extend([object()] * parked)  # type: ignore[list-item]
        begun: list[Shape] = []
        monkeypatch.setattr(spawner, "_start_child", lambda shape, *_, **__: begun.append(shape))
        for _ in range(2):
            spawner._pool.note_create(taken=False)
        spawner._use_idle_time()
        assert begun == [SHAPE] * fills


@pytest.mark.parametrize("again", ["asked", "by itself"])
def test_what_could_not_be_removed_is_not_forgotten(started, monkeypatch, again: str) -> None:
    """Each request reports it as left, and the spawner tries again until it is gone."""
    monkeypatch.setattr(spawner_module, "_BUSY_PATIENCE_SECONDS", 0.0)
    spawner, owner, zygote = started
    ((_, theirs),) = zygote.forked
    theirs.send(b"ok")
    turn(spawner)
    spawner._create(asked(1))
    slot, removed = answer_to(owner)["slot"], []
    resources: Any = spawner._resources
    resources.records.remove = removed.append
    resources.place.leave = lambda slot: False  # somebody else's process is in its group
    spawner._destroy({"request": 2, "slot": slot})
    while not spawner._busy:
        turn(spawner)
    until(lambda: spawner._retry_busy() or not spawner._busy)
    assert "cgroup" in answer_to(owner)["left"]
    spawner._destroy({"request": 3, "slot": slot})
    assert "cgroup" in answer_to(owner)["left"] and not removed
    resources.place.leave = lambda slot: True
    if again == "asked":
        spawner._destroy({"request": 4, "slot": slot})
        assert answer_to(owner)["left"] == ""
    else:
        until(lambda: spawner._retry_stuck() or removed)
    assert removed == [slot] and slot not in spawner._children and not spawner._stuck
