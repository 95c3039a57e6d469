"""Fixtures that hold for every test: its event loops never stand still in our code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import loop_watch

loop_watch.install()


def pytest_collection_finish() -> None:
    """Exclude the objects of the collected tests from garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loops_never_stand_still() -> Iterator[None]:
    """Fail a test whose event loops stood still.

    Stalls of a longer-lived fixture are reported here, too, once.
    """
    loop_watch.stalls()
    yield
    found = loop_watch.stalls()
    assert not found, "an event loop " + "\nan event loop ".join(found)
