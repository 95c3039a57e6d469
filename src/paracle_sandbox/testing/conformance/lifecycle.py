"""Checks of the backend's own methods: making, finding and removing sandboxes."""

from __future__ import annotations

import asyncio

from ...errors import (
    SandboxConflictError,
    SandboxCreationError,
    SandboxExecutionError,
    SandboxNotFoundError,
)
from ...sandbox.sandbox import Sandbox
from .case import Case
from .expect import contains, equal, eventually, expect, raises
from .registry import check

_UNKNOWN = "no-such-sandbox"


@check(quick=True)
async def health_says_it_works(case: Case) -> None:
    """health() reports on this backend and does not raise."""
    health = await case.backend.health()
    equal(health.backend, case.backend.name)
    expect(health.available, f"not available: {health.detail}")


@check()
async def create_connect_destroy(case: Case) -> None:
    """A sandbox that create() made can be connected to, and destroy() ends it."""
    sandbox_id = case.new_id()
    await case.backend.create(sandbox_id, case.config, {})
    channel = await case.backend.connect(sandbox_id)
    await case.backend.destroy(sandbox_id)
    while await channel.receive():
        pass
    await channel.close()
    await channel.close()
    await raises(SandboxNotFoundError, case.backend.connect(sandbox_id))


@check()
async def destroy_twice_is_success(case: Case) -> None:
    """Removing a sandbox again is success."""
    sandbox_id = case.new_id()
    await case.backend.create(sandbox_id, case.config, {})
    await case.backend.destroy(sandbox_id)
    await case.backend.destroy(sandbox_id)


@check()
async def destroy_unknown_is_success(case: Case) -> None:
    """Removing an unknown sandbox is success."""
    await case.backend.destroy(_UNKNOWN)


@check()
async def unknown_ids_are_not_found(case: Case) -> None:
    """connect() and usage() of an unknown id raise SandboxNotFoundError, a KeyError."""
    error = await raises(SandboxNotFoundError, case.backend.connect(_UNKNOWN))
    expect(isinstance(error, KeyError), "it is no KeyError")
    contains(str(error), "not found")
    await raises(SandboxNotFoundError, case.backend.usage(_UNKNOWN))


@check()
async def an_id_is_taken_once(case: Case) -> None:
    """A second sandbox of the same id is refused, and the first one lives on."""
    sandbox = await case.sandbox()
    again = case.backend.create(sandbox.sandbox_id, case.config, {})
    await raises(SandboxConflictError, again)
    equal(await sandbox.run_command("echo alive"), "alive\n")


@check()
async def an_id_is_free_again(case: Case) -> None:
    """The id of a sandbox that is gone can be used again, and nothing is found in it."""
    first = await case.sandbox()
    await first.write_file("old.txt", "old")
    await first.stop()
    second = Sandbox(case.backend, first.sandbox_id, case.config)
    async with second:
        equal([entry["name"] for entry in await second.list_files()], [])


@check()
async def list_shows_and_forgets(case: Case) -> None:
    """list_sandboxes() has a sandbox with its labels while it lives, and not after."""
    sandbox_id = case.new_id()
    await case.backend.create(sandbox_id, case.config, {"purpose": "conformance"})
    infos = {info.sandbox_id: info for info in await case.backend.list_sandboxes()}
    expect(sandbox_id in infos, "it is not listed")
    info = infos[sandbox_id]
    equal(info.backend, case.backend.name)
    equal(info.labels.get("purpose"), "conformance", "label")
    equal(info.owner_alive, True, "owner_alive")
    expect(info.created_at > 0, "created_at is missing")
    await case.backend.destroy(sandbox_id)
    listed = {info.sandbox_id for info in await case.backend.list_sandboxes()}
    expect(sandbox_id not in listed, "it is still listed")


@check(needs=("images",))
async def a_missing_image_fails_clean(case: Case) -> None:
    """An image that does not exist is a SandboxCreationError that names it; nothing is left."""
    image = "no-such-image-of-paracle:never"
    sandbox = case.unstarted(base_image=image)
    contains(str(await raises(SandboxCreationError, sandbox.start())), image)
    listed = {info.sandbox_id for info in await case.backend.list_sandboxes()}
    expect(sandbox.sandbox_id not in listed, "a sandbox was left behind")
    again = Sandbox(case.backend, sandbox.sandbox_id, case.config)
    async with again:
        equal(await again.run_command("echo made"), "made\n")


@check(needs=("usage",))
async def usage_grows(case: Case) -> None:
    """usage() is measured: CPU, memory, processes and disk grow with their use."""
    sandbox = await case.sandbox()
    before = await case.backend.usage(sandbox.sandbox_id)
    expect(before.processes >= 1, "no process is counted")
    expect(before.memory_bytes > 0, "no memory is counted")
    await sandbox.run_code("sum(i * i for i in range(3_000_000))")
    hog = (
        "import os, time\nx = bytearray(b'1') * (64 << 20)\n"
        "if all(os.fork() for _ in range(5)):\n    print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    async with await sandbox.start_code(hog) as command:
        async for _ in command.output():
            break
        after = await case.backend.usage(sandbox.sandbox_id)
    expect(after.cpu_seconds > before.cpu_seconds, f"CPU did not grow: {after}")
    expect(after.memory_bytes >= before.memory_bytes + (56 << 20), f"memory did not: {after}")
    expect(after.memory_peak_bytes >= after.memory_bytes, f"the peak is below: {after}")
    expect(after.processes >= before.processes + 5, f"processes did not grow: {after}")
    await sandbox.write_file("filled", b"\1" * (20 << 20))

    async def disk_has_grown() -> bool:
        usage = await case.backend.usage(sandbox.sandbox_id)
        return usage.disk_bytes >= before.disk_bytes + (19 << 20)

    await eventually(disk_has_grown, "disk use did not grow")


@check()
async def many_at_once(case: Case) -> None:
    """Eight sandboxes made, used and removed side by side do not disturb each other."""

    async def one(number: int) -> str:
        sandbox = await case.sandbox()
        await sandbox.write_file("number", str(number))
        text = await sandbox.run_command("cat number")
        await sandbox.stop()
        return text

    equal(await asyncio.gather(*map(one, range(8))), [str(n) for n in range(8)])


@check()
async def start_and_stop_are_idempotent(case: Case) -> None:
    """A second start keeps the sandbox, a second stop is a no-op; it may start anew."""
    sandbox = await case.sandbox()
    await sandbox.write_file("kept", "1")
    await sandbox.start()
    equal(await sandbox.exists("kept"), True)
    for _ in range(2):
        await sandbox.stop()
        equal(sandbox.is_running, False)
    await sandbox.cleanup()
    await sandbox.close()


@check()
async def nothing_runs_before_start(case: Case) -> None:
    """Before start and after stop, running is a SandboxExecutionError."""
    sandbox = case.unstarted()
    error = await raises(SandboxExecutionError, sandbox.execute("true"))
    contains(str(error), "not started")
    async with sandbox:
        equal(await sandbox.run_command("echo up"), "up\n")
    await raises(SandboxExecutionError, sandbox.execute("true"))
    await raises(SandboxExecutionError, sandbox.read_file("x"))


@check()
async def stop_ends_running_commands(case: Case) -> None:
    """A sandbox that is removed under a running program ends it with SandboxExecutionError."""
    sandbox = await case.sandbox()
    command = await sandbox.start_command("echo begun; sleep 1000")
    async for _ in command.output():
        break
    await sandbox.stop()
    error = await raises(SandboxExecutionError, command.wait())
    equal(error.stdout, "begun\n", "what it had printed")
