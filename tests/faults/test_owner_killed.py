"""R01, R03: the owner is killed, and everything goes with it, without any help."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from hoststate import HostState, clean_since, is_alive
from owners import usable

pytestmark = pytest.mark.clock

COUNT = 20
DEAD_SECONDS = 2.0


async def all_dead(place, seconds):
    """Wait until no process of a sandbox is left. Returns how long that took."""
    started = time.monotonic()
    while place.processes():
        assert time.monotonic() - started < seconds + 5, place.processes()
    return time.monotonic() - started


async def test_sandboxes_die_with_a_killed_owner(place, owner):
    before = HostState.take(place)
    async with owner("loops", str(COUNT)) as process:
        await process.hear("ready")
        running = place.processes()
        assert len(running) >= 2 * COUNT, "they did not run: nothing is shown here"
        process.process.kill()
        took = await all_dead(place, DEAD_SECONDS)
        assert took <= DEAD_SECONDS, f"{took:.2f} s"
    # There was no new start: its spawner cleaned up.
    await clean_since(before, place, but_records=True)
    await usable(place)
    await clean_since(before, place)


@pytest.mark.parametrize("part", ["launcher", "spawner"])
async def test_sandboxes_die_with_the_part_that_holds_them(place, owner, part):
    before = HostState.take(place)
    async with owner("loops", str(COUNT)) as process:
        await process.hear("ready")
        os.kill(getattr(process, part), signal.SIGKILL)
        assert await all_dead(place, DEAD_SECONDS) <= DEAD_SECONDS
        assert is_alive(process.process.pid), "the owner goes on"
    # The next start sweeps everything that the dead spawner could not remove.
    await usable(place)
    await clean_since(before, place)


async def test_owner_and_spawner_killed_at_once_leave_only_what_the_next_start_sweeps(place, owner):
    before = HostState.take(place)
    async with owner("loops", str(COUNT)) as process:
        await process.hear("ready")
        for pid in (process.spawner, process.launcher, process.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert await all_dead(place, DEAD_SECONDS) <= DEAD_SECONDS
    assert HostState.take(place).left_since(before), "records are left to be swept"
    await usable(place)
    await clean_since(before, place)


async def test_a_stopped_spawner_dies_with_its_owner_too(place, owner):
    """It cannot see the owner's end while it is stopped. Once it is continued, it must."""
    before = HostState.take(place)
    async with owner("loops", "2") as process:
        await process.hear("ready")
        spawner = process.spawner
        os.kill(spawner, signal.SIGSTOP)
        process.process.kill()
        await process.process.wait()
        os.kill(spawner, signal.SIGCONT)
        assert await all_dead(place, DEAD_SECONDS) <= DEAD_SECONDS
    await clean_since(before, place, but_records=True)
    await usable(place)
    await clean_since(before, place)


@pytest.mark.parametrize(
    ("source", "target", "drafts_in"),
    [
        ("tree/file", "copy", "."),
        ("tree", "copy", "."),
        ("tree", "there", "there"),
        ("tree/file", "link/../copy", "."),
    ],
    ids=["file", "tree", "tree-into-another", "file-past-a-link"],
)
async def test_a_copy_that_was_killed_is_removed_by_the_next_start(
    place, owner, tmp_path, source, target, drafts_in
):
    """R03: the old files are as they were, and nothing is there in part."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "there")
    planted = tmp_path / drafts_in / ".paracle-0123456789abcdef"  # another program's file
    planted.mkdir()
    base = tmp_path / "elsewhere" if target.startswith("link") else tmp_path
    where = {"COPY_FROM": source, "COPY_TO": f"{base}/{target}"}
    async with owner("copies", **where) as process:
        await process.hear("ready")
        async with asyncio.timeout(30):
            while len(drafts := [*(tmp_path / drafts_in).glob(".paracle-*")]) < 2:
                await asyncio.sleep(0.005)
        process.process.kill()
        await process.process.wait()
    assert all(draft.exists() for draft in drafts), "it was not killed in the middle of the copy"
    await usable(place)
    assert [*(tmp_path / drafts_in).glob(".paracle-*")] == [planted]
    assert not (tmp_path / "copy").exists()
    assert (tmp_path / "there" / "file").read_text() == "old"
    assert [*(place.state / "drafts").iterdir()] == []


KILLS = 10


async def test_an_owner_that_is_killed_while_it_destroys(place, owner):
    """R03: it is killed at moments spread over the whole operation, the first and the last among
    them. Each time the next start finds nothing that is neither there nor gone.
    """
    before = HostState.take(place)
    async with owner("destroys", "2") as process:
        await process.hear("ready")
        began = time.monotonic()
        await process.hear("over")
        whole = time.monotonic() - began
    in_the_middle = 0
    for number in range(KILLS):
        async with owner("destroys", "2") as process:
            await process.hear("ready")
            await asyncio.sleep(whole * number / (KILLS - 1))
            process.process.kill()
            in_the_middle += not any("over" in line for line in await process.lines())
        await clean_since(before, place, but_records=True)
        if number % 4 == 3:
            await usable(place)
            await clean_since(before, place)
    assert in_the_middle >= 2, "it was hardly ever killed in the middle"
