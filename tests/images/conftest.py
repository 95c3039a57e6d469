"""These tests build on a real engine."""

from __future__ import annotations

import pytest

import engines


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    engines.require("docker")
