"""One sandbox for each owner: made once, removed in a task of its own, and nobody comes between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paracle_sandbox import SandboxConfig
from paracle_sandbox.errors import SandboxCreationError, SandboxError, SandboxLimitError
from paracle_sandbox.manager import OwnerSandboxes
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.testing.fake import FakeBackend


class Owners:
    """A policy that counts, and whose removals wait for ``may_stop``."""

    def __init__(self, *, slots: int = 2, idle_timeout: float | None = None) -> None:
        self.backend = FakeBackend()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.stopped: list[tuple[str, str]] = []
        self.manager = OwnerSandboxes(
            slots, stop=self._stop, backend=self.backend, idle_timeout=idle_timeout
        )

    async def _stop(self, sandbox: Sandbox, reason: str) -> None:
        self.stopped.append((sandbox.sandbox_id, reason))
        await self.may_stop.wait()
        await sandbox.stop()

    async def open(self, owner: str) -> Sandbox:
        return await self.manager.open(owner, lambda: self._make(owner))

    async def _make(self, owner: str) -> Sandbox:
        async def start() -> Sandbox:
            sandbox = Sandbox(self.backend, owner, SandboxConfig())
            await sandbox.start()
            return sandbox

        self.manager.take_slot()
        return await self.manager.add(owner, start)


@pytest.fixture
async def owners() -> AsyncIterator[Owners]:
    found = Owners()
    yield found
    found.may_stop.set()
    await found.manager.close()
    await found.backend.close()


async def test_a_storm_of_first_requests_makes_one(owners: Owners) -> None:
    made = await asyncio.gather(*(owners.open("ann") for _ in range(50)))
    assert len({id(one) for one in made}) == 1
    assert owners.backend.created == ["ann"] and owners.manager.slots_taken == 1


async def test_a_failure_gives_the_slot_back_and_the_next_one_tries(owners: Owners) -> None:
    owners.backend.create_error = SandboxCreationError("no")
    failed = await asyncio.gather(*(owners.open("ann") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, SandboxError) for one in failed)
    assert owners.manager.slots_taken == 0
    owners.backend.create_error = None
    assert (await owners.open("ann")).is_running


async def test_who_comes_while_it_is_removed_waits_for_the_next(owners: Owners) -> None:
    first = await owners.open("ann")
    owners.may_stop.clear()
    removing = asyncio.create_task(owners.manager.remove("ann", "request"))
    await asyncio.sleep(0)
    coming = asyncio.create_task(owners.open("ann"))
    done, _ = await asyncio.wait([removing, coming], timeout=0.05)
    assert not done
    owners.may_stop.set()
    second = await coming
    assert second is not first and second.is_running and owners.manager.slots_taken == 1
    assert owners.stopped == [("ann", "request")]


async def test_a_removal_goes_on_without_its_caller(owners: Owners) -> None:
    await owners.open("ann")
    owners.may_stop.clear()
    removing = asyncio.create_task(owners.manager.remove("ann", "request"))
    await asyncio.sleep(0)
    removing.cancel()
    owners.may_stop.set()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert owners.manager.slots_taken == 0 and not owners.backend.created[1:]


async def test_one_that_died_is_removed_first(owners: Owners) -> None:
    first = await owners.open("ann")
    owners.backend.kill_guest("ann")
    while first.is_running:
        await asyncio.sleep(0.01)
    assert (await owners.open("ann")).is_running
    assert owners.stopped == [("ann", "lost")] and owners.manager.slots_taken == 1


async def test_slots_are_for_all_owners(owners: Owners) -> None:
    await asyncio.gather(owners.open("ann"), owners.open("bob"))
    with pytest.raises(SandboxLimitError):
        await owners.open("carl")
    await owners.manager.remove("bob", "request")
    await owners.open("carl")


async def test_the_reasons_of_the_manager_itself() -> None:
    idle = Owners(idle_timeout=0.05)
    await idle.open("ann")
    async with asyncio.timeout(30):
        while not idle.stopped:
            await asyncio.sleep(0.01)
    await idle.open("bob")
    await idle.manager.close()
    await idle.backend.close()
    assert idle.stopped[0] == ("ann", "idle") and idle.stopped[-1][0] == "bob"
    assert idle.stopped[-1][1] in ("shutdown", "idle")
