"""A client of the Docker engine, and in plain words why there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..errors import DockerConnectionError

if TYPE_CHECKING:
    from aiodocker import Docker

INSTALL = "pip install 'paracle-sandbox[docker]'"
CANNOT_CONNECT = 900  # the library's own number


@asynccontextmanager
async def connected() -> AsyncIterator[Docker]:
    """Where DOCKER_HOST, a context or the usual sockets lead. Raises DockerConnectionError."""
    try:
        import aiodocker
        import aiohttp
    except ImportError as error:
        raise _unavailable(f"the aiodocker package is missing ({error})", INSTALL) from error
    try:
        client = aiodocker.Docker()
    except (AssertionError, ValueError, OSError, aiodocker.DockerError) as error:
        # An assertion is how the library says that it has found no socket.
        reason = str(error) or "no engine was found"
        raise _unavailable(reason, "start it, or set DOCKER_HOST to where it listens") from error
    try:
        yield client
    except (aiohttp.ClientError, ConnectionError) as error:
        raise _not_answering(error) from error
    except aiodocker.DockerError as error:
        if error.status == CANNOT_CONNECT:
            raise _not_answering(error) from error
        raise
    finally:
        await client.close()


def _not_answering(error: Exception) -> DockerConnectionError:
    return _unavailable(str(error), "look whether the engine runs and whether you may use it")


def _unavailable(reason: str, remedy: str) -> DockerConnectionError:
    return DockerConnectionError(f"Docker not available: {reason}. To have it: {remedy}")
