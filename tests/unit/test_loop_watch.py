"""Tests of the watchdog over event loops: it notices what it is there for, and nothing else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import loop_watch

OURS = """
import json, time
async def sleeps(): time.sleep(0.5)
async def parses(text): json.loads(text)
async def is_patient(): await asyncio.sleep(0.5)
def plain(): time.sleep(0.5)
async def begins_threads(): [threading.Thread(target=len, args=("",)).start() for _ in range(9)]
import asyncio, threading
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A module that lies in a folder of the package's name."""
    (tmp_path / "paracle_sandbox").mkdir()
    (tmp_path / "paracle_sandbox" / "stands.py").write_text(OURS)
    monkeypatch.syspath_prepend(str(tmp_path / "paracle_sandbox"))
    sys.modules.pop("stands", None)
    import stands  # type: ignore[import-not-found]

    return stands


@pytest.mark.clock
async def test_a_call_that_blocks_is_found(module) -> None:
    await asyncio.create_task(module.sleeps())
    [found] = loop_watch.stalls()
    assert "sleeps" in found and "0.00 s computing" in found


@pytest.mark.clock
async def test_a_parser_that_holds_the_interpreter_is_found(module) -> None:
    text = json.dumps([[[] for _ in range(9)] for _ in range(700_000)])
    await asyncio.create_task(module.parses(text))
    [found] = loop_watch.stalls()
    assert "parses" in found


async def test_waiting_and_what_a_test_does_itself_are_not(module) -> None:
    await asyncio.create_task(module.is_patient())
    time.sleep(0.3)
    module.plain()
    assert loop_watch.stalls() == []


async def test_a_machine_that_is_busy_is_not(module) -> None:
    """The thread is kept from its processor, and from nothing else."""
    spin = "import os, time\nos.sched_setaffinity(0, {0})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(8)]
    try:
        assert await asyncio.to_thread(_spread, 0.15) == []
    finally:
        for other in others:
            other.kill()
            other.wait()


async def test_a_thread_that_has_to_wait_for_its_turn_is_not(module, monkeypatch) -> None:
    """The starter of a thread waits until the thread runs."""
    started = threading.Event.set

    def set_late(event: threading.Event) -> None:
        time.sleep(0.05)
        started(event)

    monkeypatch.setattr(threading.Event, "set", set_late)
    await asyncio.create_task(module.begins_threads())
    assert loop_watch.stalls() == []


def _spread(seconds: float) -> list[str]:
    """Run a loop in a thread of its own, on the busy processor, which computes a little at a
    time."""
    import os

    found: list[str] = []

    async def compute() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass

    def own() -> None:
        os.sched_setaffinity(0, {0})
        asyncio.run(compute())
        found.extend(loop_watch.stalls())

    thread = threading.Thread(target=own)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.clock
def test_a_process_of_its_own_reports(loop: str, tmp_path: Path) -> None:
    place = tmp_path / "paracle_sandbox"
    place.mkdir()
    (place / "stands.py").write_text(OURS)
    program = (
        f"import {loop}, asyncio, stands\n"
        "async def main():\n"
        "    await asyncio.sleep(0.2)\n"
        "    await asyncio.create_task(stands.sleeps())\n"
        "    await asyncio.sleep(0.2)\n"
        f"{loop}.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], env=loop_watch.environment(place), check=True)
    (found,) = loop_watch.stalls()
    assert "sleeps" in found
    assert loop_watch.stalls() == []


def test_a_process_without_a_loop_is_not_slowed() -> None:
    program = "import sys; assert not {'asyncio', 'loop_watch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], env=loop_watch.environment(), check=True)
