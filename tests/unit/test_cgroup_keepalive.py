"""Whoever makes sandboxes one after the other need not wait for the kernel each time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paracle_sandbox.jail.limits import cgroup_keepalive
from paracle_sandbox.jail.limits.cgroups import Cgroups, CgroupsUnavailable


class Clock:
    """The time, and how often somebody entered a group of his own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.beats = 0
        self.refuses = False

    def monotonic(self) -> float:
        return self.now

    def enter_own(self) -> bool:
        self.beats += 1
        return not self.refuses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cgroup_keepalive, "time", clock)
    return clock


def warmed(clock: Any) -> cgroup_keepalive.Heat:
    one = cgroup_keepalive.Heat(clock)
    assert not one.lasts and one.until_beat() is None
    for _ in range(2):
        one.asked()
    one.entered()
    return one


def test_it_is_kept_as_long_as_somebody_comes_in_time(clock: Clock) -> None:
    one = warmed(clock)
    for beats in range(1, 50):
        wait = one.until_beat()
        assert wait is not None
        clock.now += wait + 0.001
        one.asked()
        one.beat()
        assert clock.beats == beats and one.lasts
    one.beat()
    assert clock.beats == 49, "again, and nobody needed it"


def test_who_asks_once_in_a_while_is_no_reason(clock: Clock) -> None:
    one = cgroup_keepalive.Heat(clock)  # type: ignore[arg-type]
    for _ in range(5):
        clock.now += 0.1
        one.asked()
        one.entered()
        assert not one.in_burst and one.until_beat() is None
        one.beat()
    assert clock.beats == 0
    one.asked()
    assert one.in_burst
    clock.now += 0.1
    assert not one.in_burst


def test_who_is_served_from_a_stock_is_no_reason(clock: Clock) -> None:
    one = cgroup_keepalive.Heat(clock)  # type: ignore[arg-type]
    one.entered()
    for _ in range(5):
        one.asked(to_make=False)
        assert not one.in_burst and one.until_beat() is None


def test_who_comes_too_late_does_not_wait_for_the_kernel(clock: Clock) -> None:
    one = warmed(clock)
    clock.now += 0.02
    assert not one.lasts and one.until_beat() is None
    one.beat()
    one.entering()  # that child waits, and says so when it has
    assert clock.beats == 0 and not one.lasts
    one.entered()
    assert one.lasts


def test_where_it_is_refused_it_is_not_tried_again(clock: Clock) -> None:
    one = warmed(clock)
    clock.refuses = True
    for _ in range(5):
        clock.now += 0.001
        one.beat()
    assert clock.beats == 1 and one.until_beat() is None


def test_without_groups_nobody_waits(clock: Clock) -> None:
    one = cgroup_keepalive.Heat(None)
    assert one.lasts and one.until_beat() is None
    one.beat()


def test_who_enters_his_own_group_stays_where_he_is() -> None:
    try:
        groups = Cgroups.find(f"heat-{os.getpid()}")
    except CgroupsUnavailable as error:
        pytest.skip(f"no groups here: {error}")
    try:
        before = Path("/proc/self/cgroup").read_text()
        assert groups.enter_own()
        assert Path("/proc/self/cgroup").read_text() == before
    finally:
        groups.close()
