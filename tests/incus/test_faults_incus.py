"""What breaks under a sandbox is told as such, soon, and harms no other; nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from incus_fixtures import CONFIG, Make

import immutable
import loop_watch
from event_loops import use_in_several
from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.images import image_source
from paracle_sandbox.backends.incus.labels import SESSION, instance_name, warm_name
from paracle_sandbox.backends.machine.cgroup_usage import read_cpu
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.errors import (
    ResourceLimitError,
    SandboxCleanupError,
    SandboxConflictError,
    SandboxError,
    SandboxExecutionError,
)
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

# One write, so that whoever has seen something has seen it all.
LOOP = "import os\nos.write(1, b'begun\\n')\nwhile True: pass"
OWNER = Path(__file__).with_name("incus_owner.py")
AT_ONCE = 100 if os.environ.get("PARACLE_LONG") else 12


async def dies_with(sandbox: Sandbox, deed: Callable[[], Awaitable[None]]) -> SandboxError:
    """The error of a program under which something is killed."""
    command = await sandbox.start_code(LOOP)
    await anext(command.output())
    began = time.monotonic()
    await deed()
    with pytest.raises(SandboxError) as caught:
        await command.wait(timeout=30)
    assert time.monotonic() - began < 20
    assert not sandbox.is_running
    return caught.value


async def gone(backend: IncusBackend, *sandbox_ids: str) -> None:
    """Until the server has removed them, by itself."""
    deadline = asyncio.get_running_loop().time() + 30
    names = {instance_name(sandbox_id) for sandbox_id in sandbox_ids}
    while left := names & {one["name"] for one in await backend.instances.all()}:
        assert asyncio.get_running_loop().time() < deadline, left
        await asyncio.sleep(0.1)


def _new_id() -> str:
    """Others may run the same test on the same server."""
    return f"test-{secrets.token_hex(6)}"


async def _instances_of(*owners: IncusBackend) -> list[str]:
    sessions = {owner.session for owner in owners}
    asking = IncusBackend(owners[0].settings)
    everything = await asking.instances.all()
    await asking.close()
    return [str(one["name"]) for one in everything if one["config"].get(SESSION) in sessions]


async def test_the_guest_is_killed(
    make: Make, backend: IncusBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """R07: the agent inside; the instance goes with it, and the other one lives on."""
    sandbox, other = await make(), await make()

    async def kill() -> None:
        os.kill(backend.init_pid(sandbox.sandbox_id), signal.SIGKILL)

    error = await dies_with(sandbox, kill)
    assert isinstance(error, SandboxExecutionError) and error.stdout == "begun\n"
    assert "A guest has ended under us: paracle-guest ended: killed by signal 9" in caplog.text
    await gone(backend, sandbox.sandbox_id)
    assert await other.run_command("echo alive") == "alive\n"


async def test_the_first_process_of_the_instance_is_killed(
    make: Make, backend: IncusBackend
) -> None:
    """R07: the init."""
    sandbox, other = await make(), await make()
    first = int((await backend.instances.state(instance_name(sandbox.sandbox_id)))["pid"])

    async def kill() -> None:
        os.kill(first, signal.SIGKILL)

    error = await dies_with(sandbox, kill)
    assert isinstance(error, SandboxExecutionError)
    await gone(backend, sandbox.sandbox_id)
    assert await other.run_command("echo alive") == "alive\n"


async def test_the_porter_is_killed(make: Make, backend: IncusBackend) -> None:
    """R07: the launcher. Its guest dies with it, and nobody is left to end the instance but us."""
    sandbox, other = await make(), await make()
    porter = _parent_of(backend.init_pid(sandbox.sandbox_id))

    async def kill() -> None:
        os.kill(porter, signal.SIGKILL)

    error = await dies_with(sandbox, kill)
    assert isinstance(error, SandboxExecutionError) and error.stdout == "begun\n"
    await sandbox.stop()
    await gone(backend, sandbox.sandbox_id)
    assert await other.run_command("echo alive") == "alive\n"


def _parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


async def test_it_is_removed_under_us(make: Make, backend: IncusBackend) -> None:
    sandbox = await make()

    async def remove() -> None:
        await backend.instances.remove(instance_name(sandbox.sandbox_id))

    assert isinstance(await dies_with(sandbox, remove), SandboxExecutionError)
    await sandbox.stop()
    async with Sandbox(backend, sandbox.sandbox_id, CONFIG) as again:
        assert await again.run_command("echo again") == "again\n"


@pytest.mark.parametrize("warm", [0, 1])
def test_one_manager_serves_one_event_loop_after_the_other(settings: Settings, warm: int) -> None:
    backend = IncusBackend(replace(settings, incus_warm=warm))
    use_in_several(SandboxManager(backend=backend), CONFIG)


async def test_want_of_memory_is_told_apart(make: Make) -> None:
    sandbox = await make(SandboxConfig(memory_mb=128))
    with pytest.raises(ResourceLimitError) as caught:
        await sandbox.run_code("x = bytearray(b'1') * (1 << 30)")
    assert caught.value.resource_type == "memory"
    assert await sandbox.run_command("echo alive") == "alive\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_a_dead_owner_had_removes_itself(
    number: signal.Signals, backend: IncusBackend, settings: Settings
) -> None:
    """R01: without anybody's help."""
    with _owner(settings, "hold") as owner:
        ids = json.loads(_line(owner))
        listed = {info.sandbox_id: info for info in await backend.list_sandboxes()}
        assert set(ids) <= set(listed) and all(listed[one].owner_alive for one in ids)
        owner.send_signal(number)
        owner.wait(20)
    await gone(backend, *ids)


async def test_what_a_dead_owner_had_not_started_is_swept(
    backend: IncusBackend, settings: Settings
) -> None:
    """Its ready instance is nobody's: the next start, or a sweep, removes it."""
    with _owner(settings, "ready") as owner:
        names = json.loads(_line(owner))
        assert set(names) <= {one["name"] for one in await backend.instances.all()}
        # While its owner lives it is let alone.
        await backend.sweep()
        assert set(names) <= {one["name"] for one in await backend.instances.all()}
        owner.kill()
        owner.wait(20)
    await backend.sweep()
    assert not set(names) & {one["name"] for one in await backend.instances.all()}


@pytest.mark.parametrize("ready", [(0, 0), (1, 1, 0, 0)], ids=["cold", "some-ready"])
async def test_one_id_made_by_many_at_once_is_made_once(
    ready: tuple[int, ...], settings: Settings
) -> None:
    """R19: of one owner and of several, exactly one wins; nothing of it is deleted, and nothing of
    the others is left."""
    owners = [IncusBackend(replace(settings, incus_warm=count)) for count in ready]
    name = _new_id()
    try:
        for owner in owners:
            source = await image_source(owner.server, owner.remotes, CONFIG.base_image)
            owner.warm_pool.refill(source)
        await asyncio.gather(*(owner.warm_pool.settle() for owner in owners))
        # Whoever may use the server may remove what is kept ready.
        for kept in await _instances_of(owners[1]):
            await owners[1].instances.remove(kept)
        turns = [
            Sandbox(owner, name, CONFIG) for _ in range(AT_ONCE // len(owners)) for owner in owners
        ]
        made = await asyncio.gather(*(one.start() for one in turns), return_exceptions=True)
        won = [one for one, error in zip(turns, made, strict=True) if error is None]
        lost = [error for error in made if error is not None]
        assert len(won) == 1, lost
        assert all(isinstance(error, SandboxConflictError) for error in lost), lost
        assert await won[0].run_command("echo mine") == "mine\n"
        left = await _instances_of(*owners)
        assert [one for one in left if not one.startswith(warm_name(""))] == [instance_name(name)]
        await won[0].stop()
    finally:
        await asyncio.gather(*(owner.close() for owner in owners))
    assert not await _instances_of(*owners)


async def test_cancelled_creation_leaves_nothing(backend: IncusBackend) -> None:
    name = _new_id()
    creating = asyncio.ensure_future(backend.create(name, CONFIG, {}))
    while not any(  # noqa: ASYNC110  the server tells nobody
        one["name"] == instance_name(name) for one in await backend.instances.all()
    ):
        await asyncio.sleep(0.01)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await gone(backend, name)
    workspaces = await backend.homes.store.get()
    assert workspaces is None or os.listdir(workspaces.path) == []


class _owner:  # noqa: N801  used as a function
    """Another process that has sandboxes."""

    def __init__(self, settings: Settings, what: str) -> None:
        options = {
            "incus_socket": settings.incus_socket,
            "state_dir": settings.state_dir,
            "data_dir": settings.data_dir,
            "incus_warm": int(what in ("ready", "forget")),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(OWNER), what, json.dumps(options)],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=loop_watch.watched_environment(),
        )  # fmt: skip

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()


def _line(owner: subprocess.Popen[str]) -> str:
    assert owner.stdout
    return owner.stdout.readline()


async def test_a_program_that_closes_nothing_leaves_no_stopped_instance(
    backend: IncusBackend, settings: Settings
) -> None:
    """Whatever runs ends by itself; one that was kept ready, or was being made, would stay."""
    with _owner(settings, "forget") as owner:
        (session,) = json.loads(await asyncio.to_thread(_line, owner))
        assert await asyncio.to_thread(owner.wait, 90) == 0

    async def left() -> list[str]:
        everything = await backend.instances.all()
        return [one["name"] for one in everything if one["config"].get(SESSION) == session]

    assert not [name for name in await left() if name.startswith("paracle-warm-")]
    deadline = asyncio.get_running_loop().time() + 30
    while names := await left():
        assert asyncio.get_running_loop().time() < deadline, names
        await asyncio.sleep(0.1)


async def test_cpu_is_counted_from_the_hand_over(backend: IncusBackend, make: Make) -> None:
    sandbox = await make()
    owned = backend._owned[sandbox.sandbox_id]
    told = (await backend.usage(sandbox.sandbox_id)).cpu_seconds
    assert owned.cpu_before > 0
    assert owned.cpu_before + told <= read_cpu(owned.cgroups)


@pytest.mark.parametrize("how", ["destroy", "sweep", "close"])
async def test_files_that_could_not_be_removed_are_tried_again(
    backend: IncusBackend, make: Make, how: str
) -> None:
    sandbox = await make()
    workspaces = await backend.homes.store.get()
    assert workspaces is not None
    folder = f"{workspaces.path}/{backend._owned[sandbox.sandbox_id].slot}"
    immutable.mark(folder, immutable=True)
    try:
        for _ in range(2):
            with pytest.raises(SandboxCleanupError, match="left files"):
                await backend.destroy(sandbox.sandbox_id)
        await backend.sweep()
        assert Path(folder).exists()
    finally:
        immutable.mark(folder, immutable=False)
    if how == "destroy":
        await backend.destroy(sandbox.sandbox_id)
    elif how == "sweep":
        await backend.sweep()
    else:
        await backend.close()
    assert not Path(folder).exists()
