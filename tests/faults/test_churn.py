"""R26: create, execute, destroy, again and again: the machine stays as it was.

PARACLE_CHURN is how often; 10000 is the number of the specification.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest
from hoststate import HostState, clean_since
from owners import helpers, resident_kb, zygote

CYCLES = int(os.environ.get("PARACLE_CHURN", "400"))
# These numbers allow for kernel objects that are freed in the background, for other programs on the
# machine, and for what each processor keeps at hand. A sandbox has some 35 mounts, and their number
# varies by a hundred from one moment to the next. A leak of one object in each cycle is more.
KERNEL_SLACK = 128


def kernel_objects() -> dict[str, int]:
    """Cgroups with those that are dying still, and the objects that a sandbox is made of."""
    found = {}
    for line in Path("/proc/cgroups").read_text().splitlines()[1:]:
        name, _, count, _ = line.split()
        found[f"cgroups of {name}"] = int(count)
    stat = Path("/sys/fs/cgroup/cgroup.stat")
    if stat.exists():
        words = stat.read_text().split()
        found["dying cgroups"] = int(words[words.index("nr_dying_descendants") + 1])
    names = ("net_namespace", "mnt_cache", "pid_namespace", "user_namespace", "uts_namespace")
    for line in Path("/proc/slabinfo").read_text().splitlines()[2:]:
        fields = line.split()
        if fields[0] in names:
            found[fields[0]] = int(fields[1])
    return found


async def at_rest(pid: int) -> int:
    """How many descriptors it has when it has nothing to do: forks take some."""
    seen: list[int] = []
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        seen.append(len(os.listdir(f"/proc/{pid}/fd")))
        await asyncio.sleep(0.05)
    return seen[-1]


async def cycles(manager, count: int) -> float:
    started = time.monotonic()
    for _ in range(count):
        async with manager.managed_sandbox() as sandbox:
            assert (await sandbox.execute("echo well"))["stdout"] == "well\n"
    return count / (time.monotonic() - started)


@pytest.mark.timeout(60 + CYCLES * 0.5)
@pytest.mark.parametrize("stock", [0, 4], ids=["cold", "stocked"])
async def test_churn_leaves_the_machine_as_it_was(place, managing, stock, record_property):
    async with managing(stock=stock) as manager:
        await cycles(manager, 30)  # objects that are kept for good are made in the first few
        gc.collect()
        before, kernel = HostState.take(place), kernel_objects()
        owner, (launcher, spawner) = os.getpid(), helpers()
        parent = zygote()
        memory = {pid: resident_kb(pid) for pid in (owner, launcher, spawner, parent)}
        descriptors = await at_rest(spawner)
        of_zygote = await at_rest(parent)

        rate = await cycles(manager, CYCLES // 2)

        record_property("cycles_per_second", round(rate, 1))
        print(f"{rate:.0f} cycles a second")
        if not stock:  # children for the stock are always under way
            await clean_since(before, place)
            assert abs(await at_rest(spawner) - descriptors) <= 2
        else:
            assert await at_rest(spawner) <= descriptors + 5 * stock
        assert await at_rest(parent) == of_zygote
        for pid, kilobytes in memory.items():
            grown = resident_kb(pid) - kilobytes
            assert grown < 4096 + CYCLES // 2, f"{pid} grew by {grown} kB"
        await settled(kernel)


async def settled(before: dict[str, int], seconds: float = 30.0) -> None:
    """The kernel frees namespaces and cgroups in the background."""
    deadline = time.monotonic() + seconds
    while more := {
        name: (before.get(name, 0), count)
        for name, count in kernel_objects().items()
        if count - before.get(name, 0) > KERNEL_SLACK + 0.02 * CYCLES
    }:
        assert time.monotonic() < deadline, f"before and now: {more}"
        # Only reclaim frees the last pages of a dying memory cgroup.
        Path("/proc/sys/vm/drop_caches").write_text("2")
        time.sleep(0.5)
