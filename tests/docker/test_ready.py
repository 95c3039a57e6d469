"""Containers kept ready: each is pristine, exactly what was asked for, and used once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import oracles
import pytest
from container_fixtures import BACKENDS, changed

import engines
from paracle_sandbox.backends.base import SandboxInfo
from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.owned import Owned
from paracle_sandbox.backends.docker.ready import Wish
from paracle_sandbox.backends.machine.cgroup_usage import read_cpu
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import SandboxConflictError
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

NOBODY = 1 << 30  # more than there may be processes
KIND = SandboxConfig(memory_mb=200, disk_mb=300)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return changed(settings, docker_warm=1)


async def ready(backend: DockerBackend) -> list[str]:
    """The ids of the containers that the engine says are kept ready by this backend."""
    await backend.stock.settled()
    found = await backend.engine.containers(f"paracle.session={backend.session}")
    return [one["Id"] for one in found if one["Names"][0].startswith("/paracle-ready-")]


async def ours(backend: DockerBackend) -> list[SandboxInfo]:
    """Others may have sandboxes on this engine too."""
    return [one for one in await backend.list_sandboxes() if one.owner_pid == os.getpid()]


def new_name() -> str:
    return f"r-{os.urandom(5).hex()}"


def container(backend: DockerBackend, sandbox: Sandbox) -> str:
    return backend._owned[sandbox.sandbox_id].container


async def once(backend: DockerBackend, config: SandboxConfig = KIND, **labels: str) -> str:
    """Create one of a kind and remove it; its container."""
    async with Sandbox(backend, new_name(), config, labels) as sandbox:
        return container(backend, sandbox)


@pytest.fixture
async def stocked(backend: DockerBackend) -> AsyncIterator[DockerBackend]:
    """One of KIND is ready, after two were asked for."""
    await once(backend)
    assert not await ready(backend), "asked for once, it may never be wanted again"
    await once(backend)
    assert len(await ready(backend)) == 1
    yield backend
    await backend.close()
    assert not await ready(backend), "it stays"
    await backend.engine.close()


@pytest.mark.parametrize("engine", ["docker", "gvisor"])
async def test_the_next_of_its_kind_is_the_ready_one(stocked: DockerBackend) -> None:
    waiting = await ready(stocked)
    assert not await ours(stocked), "it is nobody's sandbox"
    before, name = time.time(), new_name()
    async with Sandbox(stocked, name, KIND) as sandbox:
        assert container(stocked, sandbox) == waiting[0]
        (info,) = await ours(stocked)
        assert info.sandbox_id == name and info.owner_alive
        assert info.created_at >= before and info.config["memory_mb"] == 200
        said = await stocked.engine.inspect(f"paracle-sandbox-{name}")
        assert said["Id"] == waiting[0] and said["HostConfig"]["Memory"] == 200 << 20
        assert await sandbox.run_command("ls -A . /tmp; touch used; pwd") == (
            ".:\n\n/tmp:\n/workspace\n"
        )
        assert (await stocked.usage(name)).memory_bytes > 0
        # Another process sees the same.
        other = BACKENDS[stocked.name](stocked.settings)
        assert [one.sandbox_id for one in await ours(other)] == [name]
        await other.close()
    again = await ready(stocked)
    assert len(again) == 1 and again != waiting, "each is used once"


@pytest.mark.parametrize("engine", ["docker", "gvisor", "podman"])
async def test_cpu_is_counted_from_the_hand_over(backend: DockerBackend) -> None:
    """Of one that is made when it is asked for, and of one that was ready."""
    for _ in range(3):
        async with Sandbox(backend, new_name(), KIND) as sandbox:
            owned = backend._owned[sandbox.sandbox_id]
            making = owned.cpu_before
            assert making > 0
            told = (await backend.usage(sandbox.sandbox_id)).cpu_seconds
            assert making + told <= read_cpu(owned.cgroups)
            # On an engine elsewhere, its process is none of this machine: the engine is asked.
            far = Owned(owned.container, owned.config, image=owned.image, pid=NOBODY)
            await backend._meter.hand_over(far)
            assert far.cpu_before >= making and not far.cgroups
            later = await backend._meter.of(far)
            assert far.cpu_before + later.cpu_seconds <= read_cpu(owned.cgroups)
        await backend.stock.settled()


async def test_nobody_gets_what_he_did_not_ask_for(stocked: DockerBackend) -> None:
    waiting = await ready(stocked)
    for config, labels in ((KIND.model_copy(update={"memory_mb": 201}), {}), (KIND, {"a": "b"})):
        assert await once(stocked, config, **labels) not in waiting
    assert not await ready(stocked), "it made room: there was one sandbox at a time"


async def test_never_more_than_there_were_sandboxes(stocked: DockerBackend) -> None:
    """B17, with a stock: of two at a time, at most two containers."""
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            found = await stocked.engine.containers(f"paracle.session={stocked.session}")
            most = max(most, sum(one["State"] == "running" for one in found))

    looking = asyncio.ensure_future(look())
    turns = asyncio.Semaphore(2)

    async def job() -> None:
        async with turns:
            await once(stocked)

    await asyncio.gather(*(job() for _ in range(8)))
    looking.cancel()
    await asyncio.wait([looking])
    assert most == 2
    assert 1 <= len(await ready(stocked)) <= 2


async def test_one_that_died_is_replaced(stocked: DockerBackend) -> None:
    """R28, with the engine's word of it and, as good as, without."""
    (waiting,) = await ready(stocked)
    pid = (await stocked.engine.inspect(waiting))["State"]["Pid"]
    os.kill(pid, signal.SIGKILL)
    assert oracles.wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    async with Sandbox(stocked, new_name(), KIND) as sandbox:
        assert container(stocked, sandbox) != waiting
        assert await sandbox.run_command("echo alive") == "alive\n"


async def test_one_that_was_removed_is_replaced(stocked: DockerBackend) -> None:
    (waiting,) = await ready(stocked)
    await stocked.engine.remove(waiting)
    async with Sandbox(stocked, new_name(), KIND) as sandbox:
        assert await sandbox.run_command("echo alive") == "alive\n"


async def test_a_name_that_is_taken_stays_taken(stocked: DockerBackend) -> None:
    name = new_name()
    async with Sandbox(stocked, name, KIND) as sandbox:
        async with Sandbox(stocked, new_name(), KIND):
            pass  # which leaves a ready one
        assert len(await ready(stocked)) == 1
        with pytest.raises(SandboxConflictError, match="exists already"):
            await stocked.create(name, KIND, {})
        assert await sandbox.run_command("echo mine") == "mine\n"


async def test_an_image_that_was_built_anew_is_the_new_one(settings: Settings) -> None:
    image = f"paracle-test/moving:{os.urandom(4).hex()}"
    config = SandboxConfig(base_image=image)
    backend = DockerBackend(settings)
    try:
        _tag("paracle/sandbox:latest", image)
        await once(backend, config)
        await once(backend, config)
        (waiting,) = await ready(backend)
        _docker("build", "-t", image, "-", stdin=f"FROM {image}\nLABEL new={image}\n")
        assert await once(backend, config) != waiting
    finally:
        await backend.close()
        _docker("rmi", "-f", image)


def _tag(image: str, name: str) -> None:
    _docker("tag", image, name)


def _docker(*words: str, stdin: str = "") -> None:
    env = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
    subprocess.run(["docker", *words], input=stdin, text=True, env=env, check=True,
                   capture_output=True)  # fmt: skip


async def test_none_is_kept_unless_it_can_be(settings: Settings) -> None:
    given = Path(settings.volumes[0])
    given.mkdir(parents=True)
    backend = DockerBackend(settings)
    for config in (
        SandboxConfig(volumes={str(given): "/data"}),
        SandboxConfig(network_mode="host"),
    ):
        await once(backend, config)
        await once(backend, config)
    assert not await ready(backend), "a folder or a network is given at its time"
    await backend.close()
    without = DockerBackend(changed(settings, docker_warm=Settings().docker_warm))
    await once(without)
    await once(without)
    assert not await ready(without), "nobody asked for it"
    await without.close()


async def test_kinds_that_nobody_wants_any_more_are_let_go(stocked: DockerBackend) -> None:
    """Eight are remembered. With one sandbox beside, there is room for one that is ready."""
    async with Sandbox(stocked, new_name(), SandboxConfig()):
        await once(stocked)
        (waiting,) = await ready(stocked)
        for number in range(7):
            stocked.stock.note(Wish(KIND, {"kind": str(number)}))
        assert await ready(stocked) == [waiting]
        stocked.stock.note(Wish(KIND, {"kind": "one more"}))
        assert not await ready(stocked)
