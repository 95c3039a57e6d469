"""What Incus sandboxes cost: create with and without a ready instance beside ``incus launch``, and
a command beside ``incus exec``. The server is that of the settings, else that of the tests."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paracle_sandbox import Sandbox, SandboxConfig
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import instance_name
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings, load_settings

from .measure import Times, run_command, timed, timed_command

_RUN = Path(os.environ.get("PARACLE_TEST_RUN", "/run/paracle-sandbox-tests"))
_TEST_IMAGE = "paracle-test-base"


@dataclass(frozen=True)
class Figures:
    cold: Times
    warm: Times
    launch: Times
    command: Times
    exec_command: Times


def _settings() -> tuple[Settings, str]:
    """The server, and an image that it has."""
    settings = load_settings()
    socket = _RUN / "incus" / "unix.socket"
    if settings.incus_socket is None and settings.incus_dir is None and socket.exists():
        return replace(settings, incus_socket=str(socket)), _TEST_IMAGE
    return settings, settings.default_config("incus").base_image


@asynccontextmanager
async def _backend(ready: int) -> AsyncIterator[tuple[IncusBackend, SandboxConfig]]:
    settings, image = _settings()
    backend = IncusBackend(replace(settings, incus_warm=ready))
    try:
        yield backend, SandboxConfig(base_image=image)
    finally:
        await backend.close()


async def figures(count: int) -> Figures:
    """Raises SandboxError when there is no server that can be used."""
    cold = await _create_times("incus create, no ready instance", 0, max(2, count // 20))
    warm = await _create_times("incus create, ready instance", 1, max(3, count // 10))
    async with _backend(0) as (backend, config):
        os.environ["INCUS_SOCKET"] = backend.server.remote.socket_path or ""
        launch = _launch_times(config.base_image, await backend.homes.pool(), max(2, count // 20))
        sandbox = Sandbox(backend, new_sandbox_id(), config)
        async with sandbox:
            command = await timed(
                "incus sh true in a live sandbox", lambda: sandbox.execute("true"), count
            )
            name = instance_name(sandbox.sandbox_id)
            exec_command = await timed_command(
                "incus exec -- sh -c true",
                ["incus", "exec", name, "--", "sh", "-c", "true"],
                max(10, count // 4),
            )
    return Figures(cold, warm, launch, command, exec_command)


def _launch_times(image: str, pool: str, count: int) -> Times:
    """Until the client says that it runs; what it takes to remove it is not counted here either."""
    values = []
    for _ in range(count):
        name = f"bench-{secrets.token_hex(4)}"
        start = time.perf_counter()
        run_command(["incus", "launch", image, name, "--no-profiles", "--storage", pool])
        values.append((time.perf_counter() - start) * 1e3)
        run_command(["incus", "delete", "--force", name])
    return Times("incus launch", tuple(values))


async def _create_times(name: str, ready: int, count: int) -> Times:
    """Create alone: to remove an instance costs what its pool costs."""
    values = []
    async with _backend(ready) as (backend, config):
        for number in range(count + 1):
            await backend.warm_pool.settle()
            sandbox = Sandbox(backend, new_sandbox_id(), config)
            start = time.perf_counter()
            await sandbox.start()
            if number:  # before the first there is nothing ready
                values.append((time.perf_counter() - start) * 1e3)
            await sandbox.stop()
    return Times(name, tuple(values))
