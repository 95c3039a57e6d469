"""What holds for every test: its event loops never stand still in our code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import loop_watch

loop_watch.install()


def pytest_collection_finish() -> None:
    """What the tests consist of is nothing for the collector to go through again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loops_never_stand_still() -> Iterator[None]:
    """Also what a fixture of a longer life did in the meantime is told here, once."""
    loop_watch.stalls()
    yield
    found = loop_watch.stalls()
    assert not found, "an event loop " + "\nan event loop ".join(found)
