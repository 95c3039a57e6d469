"""R25: operations in a random order, many at a time; what the machine holds stays as it was.

Briefly, unless PARACLE_LONG is set: then for a minute, with fifty at a time. PARACLE_SOAK_SECONDS
is another time. How long an operation takes is for benchmarks/ to watch, not for this.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time

import pytest
from hoststate import HostState, clean_since
from owners import helpers, resident_kb, zygote

from paracle_sandbox.errors import SandboxError, SandboxTimeoutError

USUAL, AT_ONCE = (60.0, 50) if os.environ.get("PARACLE_LONG") else (3.0, 8)
SECONDS = float(os.environ.get("PARACLE_SOAK_SECONDS", USUAL))


async def one_life(manager, chance: random.Random) -> None:
    async with manager.managed_sandbox() as sandbox:
        for _ in range(chance.randrange(1, 5)):
            match chance.randrange(5):
                case 0:
                    assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
                case 1:
                    assert (await sandbox.run_code("print(6 * 7)"))["stdout"] == "42\n"
                case 2:
                    await sandbox.write_file("f", "x" * chance.randrange(1 << 16))
                    assert set(await sandbox.read_file("f")) <= {"x"}
                case 3:
                    command = await sandbox.start_command("sleep 300")
                    await command.kill()
                    await command.wait()
                case 4:
                    try:
                        await sandbox.execute("sleep 300", timeout=0.2)
                    except SandboxTimeoutError:
                        pass


async def lives(manager, seconds: float, seed: int) -> int:
    """Run one life of a sandbox after the other until the time is over. Returns how many."""
    ends, chance, count = time.monotonic() + seconds, random.Random(seed), 0
    while time.monotonic() < ends or not count:
        try:
            await one_life(manager, chance)
        except SandboxError as error:
            raise AssertionError(f"seed {seed}, life {count}: {error!r}") from error
        count += 1
    return count


async def all_lives(manager, seconds: float, first_seed: int = 0) -> int:
    seeds = range(first_seed, first_seed + AT_ONCE)
    return sum(await asyncio.gather(*(lives(manager, seconds, seed) for seed in seeds)))


@pytest.mark.timeout(240 + 2 * SECONDS)
async def test_a_soak_leaves_the_machine_as_it_was(place, managing):
    async with managing() as manager:
        await all_lives(manager, 0)
        gc.collect()
        launcher, spawner = helpers()
        ours = {"owner": os.getpid(), "launcher": launcher, "spawner": spawner, "zygote": zygote()}
        before, threads = HostState.take(place), threading.active_count()
        descriptors = len(os.listdir(f"/proc/{spawner}/fd"))
        done = await all_lives(manager, SECONDS / 2)
        gc.collect()
        memory = {name: resident_kb(pid) for name, pid in ours.items()}
        more = await all_lives(manager, SECONDS / 2, AT_ONCE)
        assert min(done, more) >= AT_ONCE
        gc.collect()
        for name, pid in ours.items():
            grown = resident_kb(pid) - memory[name]
            # The limit of test_churn.py: some noise, and less than one kB for each life.
            assert grown < 4096 + more, f"the {name} grew by {grown} kB in {more} lives"
        await clean_since(before, place)
        assert threading.active_count() <= threads + AT_ONCE
        assert len(os.listdir(f"/proc/{spawner}/fd")) <= descriptors + 4
