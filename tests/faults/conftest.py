"""Fixtures of the fault tests: directories of their own, and owners that are separate processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hoststate import Place, adopting
from owners import Owner, native_manager


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here) and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="cgroups of native sandboxes: run as root"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with adopting():
        yield Place(tmp_path)


@pytest.fixture
def owner(place: Place) -> Callable[..., Owner]:
    """Return a function that starts owners: ``async with owner("loops", "20") as process``."""
    return lambda *arguments, **environment: Owner(place, *arguments, **environment)


@pytest.fixture
def managing(place: Place):
    return lambda **settings: native_manager(place, **settings)
