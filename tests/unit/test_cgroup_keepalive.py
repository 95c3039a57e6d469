"""With version 1, a process that enters its group need not wait if another did just before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paracle_sandbox.jail.limits.cgroup_keepalive import KeepAlive


def kept() -> KeepAlive:
    one = KeepAlive(wanted=True)
    if one.until_beat() is None:
        pytest.skip("there is no group of version 1 here that may be entered")
    return one


def test_a_process_that_enters_its_own_group_stays_where_it_is() -> None:
    one, before = kept(), Path("/proc/self/cgroup").read_text()
    for _ in range(3):
        wait = one.until_beat()
        assert wait is not None
        time.sleep(wait)
        one.beat()
    assert Path("/proc/self/cgroup").read_text() == before
    one.close()


def test_it_is_entered_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    one, written = kept(), []
    monkeypatch.setattr(os, "write", lambda *said: written.append(said))
    for _ in range(3):
        one.beat()
    assert len(written) <= 1 + 3 * (one.until_beat() == 0.0)
    monkeypatch.undo()
    one.close()


def test_where_it_is_refused_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = kept()

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "write", refuse)
    one.beat()
    assert one.until_beat() is None
    one.beat()


def test_without_version_1_nothing_is_done() -> None:
    one = KeepAlive(wanted=False)
    one.beat()
    assert one.until_beat() is None
