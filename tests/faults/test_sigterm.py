"""R05: a service gets SIGTERM while fifty executions run."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from hoststate import HostState, clean_since
from owners import usable

COUNT = 50
EXIT_SECONDS = 10.0


@pytest.mark.clock
async def test_a_manager_that_closes_tells_every_client_and_leaves_nothing(place, owner):
    before = HostState.take(place)
    async with owner("polite", str(COUNT)) as process:
        await process.hear("ready", 120)
        assert len(place.processes()) >= 2 * COUNT
        started = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        outcomes = await process.hear("outcomes")
        async with asyncio.timeout(EXIT_SECONDS):
            assert await process.process.wait() == 0
        assert time.monotonic() - started <= EXIT_SECONDS
        assert outcomes == ["SandboxExecutionError"] * COUNT
    await clean_since(before, place)
    await usable(place)


async def test_an_owner_without_a_handler_ends_at_once_and_leaves_nothing(place, owner):
    before = HostState.take(place)
    async with owner("loops", str(COUNT)) as process:
        await process.hear("ready", 120)
        process.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(EXIT_SECONDS):
            assert await process.process.wait() == -signal.SIGTERM
    await clean_since(before, place, but_records=True)
    await usable(place)
    await clean_since(before, place)


async def test_ctrl_c_reaches_the_owner_and_not_its_helpers_first(place, owner):
    """On an interrupt from the terminal, the manager's own exit removes its sandboxes."""
    before = HostState.take(place)
    async with owner("loops", "3") as process:
        await process.hear("ready", 120)
        process.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(EXIT_SECONDS):
            assert await process.process.wait() != 0
    await clean_since(before, place)
