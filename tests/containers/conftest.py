"""These tests start containers on the engine of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_image import Agent

import engines


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    engines.require("docker")
    yield Agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[2]
