"""Connects to the container engine that images are built on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..backends.catalog import engine_client
from ..settings import load_settings

if TYPE_CHECKING:
    from aiodocker import Docker

CANNOT_CONNECT = 900  # the status with which aiodocker reports that it cannot connect


@asynccontextmanager
async def engine_connection() -> AsyncIterator[Docker]:
    """Connect to the engine of the settings. Raises DockerConnectionError."""
    async with engine_client(load_settings()) as client:
        yield client
