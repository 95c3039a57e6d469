"""The end of a container is reported correctly, whatever the order of the engine's events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from paracle_sandbox.backends.docker.engine import Engine
from paracle_sandbox.backends.docker.events import Watch

OOM = {"Action": "oom", "Actor": {"ID": "box"}}
KILLED = {"Action": "die", "Actor": {"ID": "box", "Attributes": {"exitCode": "137"}}}
ENDED = {"Action": "die", "Actor": {"ID": "box", "Attributes": {"exitCode": "0"}}}


class News:
    """An engine that sends these events, with a moment between them."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self._events = events

    async def events(self, _filters: object) -> AsyncIterator[dict[str, Any]]:
        for event in self._events:
            yield event
            await asyncio.sleep(0.05)
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("events", "code", "oom"),
    [((OOM, KILLED), 137, True), ((KILLED, OOM), 137, True), ((KILLED,), 137, False),
     ((ENDED,), 0, False), ((), None, False)],
)  # fmt: skip
async def test_memory_is_the_cause_whenever_that_is_told(
    events: tuple[dict[str, Any], ...], code: int | None, oom: bool
) -> None:
    watch = Watch(cast(Engine, News(*events)), "session")
    watch.begin("box")
    death = await watch.cause("box", 1.0)
    assert (death.exit_code, death.oom) == (code, oom)
    await watch.close()
