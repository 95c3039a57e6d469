"""Hostile code against gVisor: every row of ``tests/hostile`` that can be had here."""

from __future__ import annotations

import pytest
from hostile_rows import hostile_tests

DIFFERENT: dict[str, str] = {}


@pytest.fixture
def engine() -> str:
    return "gvisor"


globals().update(hostile_tests(DIFFERENT))
