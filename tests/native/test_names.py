"""The first sandbox with a name has it, and another's sandbox is never touched."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paracle_sandbox import SandboxConfig, load_settings
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import (
    SandboxCleanupError,
    SandboxConflictError,
    SandboxExecutionError,
    SandboxNotFoundError,
)

CONFIG = SandboxConfig()


@pytest.fixture
async def backends(tmp_path: Path):
    """Provide two owners in one place, which must be empty afterwards."""
    settings = replace(load_settings(), state_dir=str(tmp_path / "state"), stock=1)
    made = [NativeBackend(settings), NativeBackend(settings)]
    yield made
    for backend in made:
        await backend.close()
    assert [path.name for path in (tmp_path / "state").rglob("*")] == ["instances"]


async def names(backend: NativeBackend) -> list[str]:
    return [info.sandbox_id for info in await backend.list_sandboxes()]


async def test_of_many_at_once_one_gets_the_name(backends):
    for _ in range(3):
        asked = [backend.create("wanted", CONFIG, {}) for backend in backends * 2]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert outcomes.count(None) == 1
        assert sum(isinstance(one, SandboxConflictError) for one in outcomes) == 3
        assert await names(backends[0]) == ["wanted"]
        slots = [record for record in backends[0].records.all() if "id" in record.content]
        (owner,) = [backend for backend in backends if "wanted" in backend._owned]
        await owner.destroy("wanted")
        assert len({record.content["slot"] for record in slots}) == 1, "the losers gave theirs back"


async def test_one_that_was_destroyed_elsewhere_is_not_destroyed_again(backends):
    first, second = backends
    await first.create("taken", CONFIG, {})
    await second.destroy("taken")
    await second.create("taken", CONFIG, {})
    await first.destroy("taken")
    assert await names(first) == ["taken"] and "taken" in second._owned
    await second.destroy("taken")


async def test_the_name_of_a_child_is_no_name_of_a_sandbox(backends):
    first, second = backends
    await first.create("known", CONFIG, {})
    slot = first._owned["known"].record["slot"]
    with pytest.raises(SandboxNotFoundError):
        await second.usage(slot)
    await second.destroy(slot)
    assert await names(second) == ["known"]


async def test_who_asks_while_it_is_closed_is_told(backends):
    first, _ = backends
    await first.create("there", CONFIG, {})
    asked = asyncio.ensure_future(first.create("late", not_in_stock(), {}))
    while first._owned and not first._spawners["default"]._answers:
        await asyncio.sleep(0)
    await first.close()
    with pytest.raises(SandboxExecutionError):
        async with asyncio.timeout(30):
            await asked


@pytest.mark.parametrize("by", ["destroy", "close"])
async def test_a_record_that_cannot_be_looked_at_holds_up_nothing_else(backends, monkeypatch, by):
    first, _ = backends
    await first.create("there", CONFIG, {})
    pid = first.init_pid("there")

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(first.records, "remove", refuse)
    if by == "destroy":
        with pytest.raises(SandboxCleanupError, match="too many"):
            await first.destroy("there")
    await first.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_what_comes_in_the_moment_of_a_cancellation_is_closed(backends, monkeypatch):
    first, _ = backends
    await first.create("there", CONFIG, {})
    spawner = first._spawners["default"]
    before = len(os.listdir("/proc/self/fd"))
    asked = asyncio.ensure_future(first.create("late", not_in_stock(), {}))
    while not spawner._answers:
        await asyncio.sleep(0)
    (answer,) = spawner._answers.values()
    real = spawner._dispatch
    monkeypatch.setattr(spawner, "_dispatch", lambda *news: (real(*news), asked.cancel()))
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert answer.result()[1], "it came"
    assert len(os.listdir("/proc/self/fd")) == before
    assert await names(first) == ["there"]


def not_in_stock() -> SandboxConfig:
    """Return a configuration that the stock does not have, so that creating it takes a while."""
    return SandboxConfig(working_dir="/elsewhere")


def test_an_owner_that_ignores_the_end_of_its_children(tmp_path: Path):
    program = (
        "import paracle_sandbox; print(paracle_sandbox.run('print(6 * 7)')['result']['stdout'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PARACLE_STATE_DIR": str(tmp_path / "state")},
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) and None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("42", 0), done.stderr
    assert [path.name for path in (tmp_path / "state").rglob("*")] == ["instances"]
