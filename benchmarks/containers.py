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

from .measure import Times, per_second, run_command, timed, timed_command, timed_in_turns

_RUN = Path(os.environ.get("PARACLE_TEST_RUN", "/run/paracle-sandbox-tests"))
_TEST_IMAGES = ("paracle/sandbox:latest", "python:3.12-slim")
_HELLO = "print('hello')"
_AT_ONCE = 8
_SECONDS = 6.0


@dataclass(frozen=True)
class Figures:
    """``fresh`` is create, hello, destroy; ``run_rm`` is the client's run with its defaults,
    ``run_rm_alone`` without a network, as ours are; those called ``at_once`` are per second, eight
    at a time."""

    fresh: Times
    run_rm: Times
    run_rm_alone: Times
    command: Times
    exec_command: Times
    at_once: float
    run_rm_at_once: float
    commands_at_once: float
    execs_at_once: float


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
async def _open(
    kind: type[DockerBackend],
) -> AsyncIterator[tuple[DockerBackend, SandboxConfig]]:
    backend = kind(_settings())
    try:
        yield backend, SandboxConfig(base_image=await _image(backend))
    finally:
        await backend.close()


async def _fresh(backend: DockerBackend, config: SandboxConfig) -> None:
    async with Sandbox(backend, new_sandbox_id(), config) as sandbox:
        result = await sandbox.run_code(_HELLO)
        if result["stdout"] != "hello\n":
            raise RuntimeError(result["stderr"])


async def figures(name: str, count: int) -> Figures:
    """Of ``docker`` or ``gvisor``. Raises SandboxError when there is none that can be used."""
    kind = {"docker": DockerBackend, "gvisor": GvisorBackend}[name]
    few = max(10, count // 5)
    async with _open(kind) as (backend, config):
        runtime = backend.runtime or "runc"
        client = ["docker", "--host", str(_settings().docker_host or "")]
        chosen = ["--runtime", runtime] if backend.runtime else []
        hello = [*chosen, config.base_image, "python3", "-c", _HELLO]
        run_rm = [*client, "run", "--rm", *hello]
        run_rm_alone = [*client, "run", "--rm", "--network", "none", *hello]

        async def in_turn(command: list[str]) -> None:
            run_command(command)

        fresh = f"{name}: create + hello + destroy"
        theirs = f"docker run --rm, {runtime}"
        alone = f"docker run --rm --network none, {runtime}"
        times = await timed_in_turns(
            {
                fresh: lambda: _fresh(backend, config),
                theirs: lambda: in_turn(run_rm),
                alone: lambda: in_turn(run_rm_alone),
            },
            few,
        )
        command, exec_command, commands, execs = await _commands(
            name, client, backend, config, count
        )
        at_once = await per_second(lambda _: _fresh(backend, config), _AT_ONCE, _SECONDS)
        return Figures(
            times[fresh], times[theirs], times[alone], command, exec_command,
            at_once,
            await per_second(lambda _: _client(run_rm_alone), _AT_ONCE, _SECONDS),
            commands,
            execs,
        )  # fmt: skip


async def _commands(
    name: str, client: list[str], backend: DockerBackend, config: SandboxConfig, count: int
) -> tuple[Times, Times, float, float]:
    """One after another, then per second with eight at a time; ours, then the client's."""
    async with Sandbox(backend, new_sandbox_id(), config) as sandbox:
        inside = [*client, "exec", container_name(sandbox.sandbox_id), "sh", "-c", "true"]
        command = await timed(
            f"{name}: sh true in a live sandbox", lambda: sandbox.execute("true"), count
        )
        exec_command = await timed_command(
            f"docker exec, {backend.runtime or 'runc'}", inside, max(10, count // 5)
        )
        ours = await per_second(lambda _: sandbox.execute("true"), _AT_ONCE, _SECONDS)
        theirs = await per_second(lambda _: _client(inside), _AT_ONCE, _SECONDS)
    return command, exec_command, ours, theirs


async def _client(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError(f"{' '.join(command[3:5])} failed")
