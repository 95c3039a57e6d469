"""What users of managers, executors and containers rely on, with the engine as the witness.

The same behaviours seen from inside the library are in the conformance suite, which runs on real
engines too: results and their shapes (B14-B16, B25), monitors (B18-B21), files and copies
(B45-B47, B52, B53, B60), terminals (B48-B50, B61). Pulls (B8) and networks (B23) have tests of
their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import oracles
import pytest
from container_fixtures import Make

from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    ResourceLimitError,
    SandboxError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)
from paracle_sandbox.executor import SandboxExecutor
from paracle_sandbox.manager import SandboxManager

ON_EACH = pytest.mark.parametrize("engine", ["docker", "gvisor"])


async def containers(backend: DockerBackend) -> set[str]:
    """The sandboxes that the engine says this backend has, in whatever state."""
    found = await backend.engine.containers(f"paracle.session={backend.session}")
    names = (str(one["Names"][0]) for one in found)
    prefix = "/paracle-sandbox-"
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def running(marker: str) -> list[int]:
    """Processes of this machine with the marker in their command line, but for ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


async def test_what_never_ends_is_really_gone(make: Make) -> None:
    """B6, B50: also what left its group and session, and the next command works."""
    sandbox, marker = await make(), f"mark-{os.urandom(6).hex()}"
    loop = f"sh -c 'while :; do :; done' {marker}"
    script = f"setsid {loop} & trap '' TERM INT HUP; echo up; {loop}"
    with pytest.raises(SandboxTimeoutError) as caught:
        await sandbox.execute(script, timeout=1)
    assert isinstance(caught.value, TimeoutError) and caught.value.stdout == "up\n"
    assert oracles.wait_until(lambda: not running(marker)), "it still runs"
    assert await sandbox.run_command("echo next") == "next\n"


@ON_EACH
async def test_a_manager_and_the_engine_agree(backend: DockerBackend) -> None:
    """B10-B12, B26, B54, B56, B57, B59."""
    manager = SandboxManager(max_concurrent=2, backend=backend)
    first, second = await manager.create_sandbox(), await manager.create_sandbox()
    assert first != second
    assert set(manager.active_sandboxes) == {first, second} == await containers(backend)
    with pytest.raises(SandboxError) as caught:
        await manager.create_sandbox()
    assert str(caught.value) == "Maximum number of sandboxes (2) reached"
    assert await containers(backend) == {first, second}, "the refused one left something"
    await manager.delete_sandbox(first)
    assert set(manager.active_sandboxes) == {second} == await containers(backend)
    with pytest.raises(KeyError) as unknown:
        await manager.get_sandbox(first)
    assert isinstance(unknown.value, SandboxNotFoundError)
    assert str(unknown.value) == f"Sandbox {first} not found"
    await manager.cleanup()
    assert not manager.active_sandboxes and not await containers(backend)
    await manager.close()
    await manager.close()


async def test_a_managed_sandbox_ends_with_its_block(backend: DockerBackend) -> None:
    """B13, B26."""
    async with SandboxManager(backend=backend) as manager:
        with pytest.raises(LookupError):
            async with manager.managed_sandbox(SandboxConfig()) as sandbox:
                assert await containers(backend) == {sandbox.sandbox_id}
                raise LookupError
        assert not manager.active_sandboxes and not await containers(backend)


async def test_an_idle_one_is_removed_from_the_engine(backend: DockerBackend) -> None:
    """B58."""
    async with SandboxManager(backend=backend, idle_timeout=0.2, cleanup_interval=0.05) as manager:
        await manager.create_sandbox()
        async with asyncio.timeout(60):
            while manager.active_sandboxes or await containers(backend):
                await asyncio.sleep(0.05)


@ON_EACH
async def test_a_batch_has_as_many_containers_as_it_may(backend: DockerBackend) -> None:
    """B17: three jobs, two at a time, in order."""
    most, done = 0, asyncio.Event()

    async def look() -> None:
        nonlocal most
        while not done.is_set():
            found = await backend.engine.containers(f"paracle.session={backend.session}")
            most = max(most, sum(one["State"] == "running" for one in found))

    async with SandboxExecutor(SandboxManager(max_concurrent=2, backend=backend)) as executor:
        looking = asyncio.ensure_future(look())
        # Long enough for the first two to be seen together, also on a busy machine.
        codes = [f"import time; time.sleep(3); print({number})" for number in range(3)]
        jobs = [{"agent_code": code, "monitor": False} for code in codes]
        answers = await executor.execute_batch(jobs, max_concurrent=2)
        done.set()
        await looking
        await executor.manager.close()
    assert [answer["result"]["stdout"] for answer in answers] == ["0\n", "1\n", "2\n"]
    assert most == 2
    assert not await containers(backend)


@ON_EACH
async def test_a_gigabyte_does_not_fit_into_half(make: Make) -> None:
    """B24: told as a limit, not as a bare exit code."""
    sandbox = await make(SandboxConfig(memory_mb=512))
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.run_code("data = b'x' * (1 << 30); print(len(data))")
    assert caught.value.resource_type == "memory" and caught.value.limit == 512 << 20
    assert "512 MB" in str(caught.value)


async def test_directories_and_names(make: Make) -> None:
    """B60."""
    sandbox = await make()
    await sandbox.mkdir("one/two")
    await sandbox.write_file("one/two/deep/file.txt", "text")
    await sandbox.move("one/two/deep/file.txt", "one/renamed.txt")
    assert await sandbox.read_file("one/renamed.txt") == "text"
    with pytest.raises(FileNotFoundError):
        await sandbox.remove("one/renamed")
    await sandbox.remove("one", recursive=True)
    assert not await sandbox.exists("one")
