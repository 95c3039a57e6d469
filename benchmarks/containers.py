"""What containers cost, ours beside the engine's own client: create, a command, eight at a time.

The engine is the one that the settings name, else that of the tests. Every runtime is measured
beside the client's own use of the same runtime."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paracle_sandbox import Sandbox, SandboxConfig
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.gvisor import GvisorBackend
from paracle_sandbox.backends.docker.labels import container_name
from paracle_sandbox.errors import SandboxError
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.settings import Settings, load_settings

from .measure import Times, per_second, timed, timed_command

_RUN = Path(os.environ.get("PARACLE_TEST_RUN", "/run/paracle-sandbox-tests"))
_TEST_IMAGES = ("paracle/sandbox:latest", "python:3.12-slim")
_HELLO = "print('hello')"
_AT_ONCE = 8
_SECONDS = 8.0


@dataclass(frozen=True)
class Figures:
    """``fresh`` is create, hello, destroy; ``at_once`` are those per second, eight at a time."""

    fresh: Times
    run_rm: Times
    command: Times
    exec_command: Times
    at_once: float
    run_rm_at_once: float


def _settings() -> Settings:
    settings = load_settings()
    socket = _RUN / "docker.sock"
    if settings.docker_host is None and socket.exists():
        return replace(settings, docker_host=f"unix://{socket}")
    return settings


async def _image(backend: DockerBackend) -> str:
    """The first of our images that the engine has."""
    for name in _TEST_IMAGES:
        try:
            await backend.client.images.inspect(name)
            return name
        except Exception:  # noqa: BLE001, S112  the engine's library has many
            continue
    raise SandboxError("the engine has no image of ours (paracle image build)")


@asynccontextmanager
async def _open(kind: type[DockerBackend]) -> AsyncIterator[tuple[DockerBackend, SandboxConfig]]:
    backend = kind(_settings())
    try:
        yield backend, SandboxConfig(base_image=await _image(backend))
    finally:
        await backend.close()


async def figures(name: str, count: int) -> Figures:
    """Of ``docker`` or ``gvisor``. Raises SandboxError when there is none that can be used."""
    kind = {"docker": DockerBackend, "gvisor": GvisorBackend}[name]
    few = max(5, count // 10)
    async with _open(kind) as (backend, config):
        runtime = ["--runtime", backend.runtime] if backend.runtime else []
        client = ["docker", "--host", str(_settings().docker_host or "")]
        plain = [*client, "run", "--rm", "--network", "none", *runtime, config.base_image]
        run_rm = [*plain, "python3", "-I", "-c", _HELLO]

        async def fresh(_: int = 0) -> None:
            async with Sandbox(backend, new_sandbox_id(), config) as sandbox:
                result = await sandbox.run_code(_HELLO)
                if result["stdout"] != "hello\n":
                    raise RuntimeError(result["stderr"])

        async def theirs(_: int) -> None:
            process = await asyncio.create_subprocess_exec(
                *run_rm, stdout=asyncio.subprocess.DEVNULL
            )
            await process.wait()

        ours = await timed(f"{name}: create + hello + destroy", fresh, few)
        beside = await timed_command(f"docker run --rm, {backend.runtime or 'runc'}", run_rm, few)
        async with Sandbox(backend, new_sandbox_id(), config) as sandbox:
            command = await timed(
                f"{name}: sh true in a live sandbox", lambda: sandbox.execute("true"), count
            )
            inside = [*client, "exec", container_name(sandbox.sandbox_id), "sh", "-c", "true"]
            exec_command = await timed_command(
                f"docker exec, {backend.runtime or 'runc'}", inside, few
            )
        return Figures(
            ours, beside, command, exec_command,
            await per_second(fresh, _AT_ONCE, _SECONDS),
            await per_second(theirs, _AT_ONCE, _SECONDS),
        )  # fmt: skip
