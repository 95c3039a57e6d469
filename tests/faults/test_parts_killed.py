"""R07: one part is killed.

The error is the right one, no other sandbox suffers, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from hoststate import below, children_of, is_alive
from owners import helpers, zygote

from paracle_sandbox.errors import SandboxExecutionError

LOOP = "print('running', flush=True)\nwhile True: pass\n"


async def running(sandbox):
    """Start a command that computes for ever, and wait until it says so."""
    command = await sandbox.start_code(LOOP, timeout=120)
    async with asyncio.timeout(20):
        while command.stdout_bytes != b"running\n" or command.pid is None:
            await asyncio.sleep(0.01)
    return command


def host_pid(init: int, inside: int) -> int:
    """Return the host's pid of a process that has this pid in the sandbox."""
    for pid, _ in below(init):
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.split("NSpid:")[1].splitlines()[0].split()[-1]) == inside:
            return pid
    raise AssertionError(f"no process is {inside} in the sandbox of {init}")


async def assert_well(sandbox) -> None:
    assert (await sandbox.execute("echo well"))["stdout"] == "well\n"


async def test_a_killed_guest_is_an_error_of_its_sandbox_alone(managing):
    async with managing() as manager:
        victim, other = await manager.create(), await manager.create()
        doomed, unharmed = await running(victim), await running(other)
        os.kill(manager.backend.init_pid(victim.sandbox_id), signal.SIGKILL)
        with pytest.raises(SandboxExecutionError) as caught:
            async with asyncio.timeout(5):
                await doomed.wait()
        assert caught.value.stdout == "running\n"
        assert not victim.is_running
        with pytest.raises(SandboxExecutionError):
            await victim.execute("true")
        assert unharmed.poll() is None
        await assert_well(other)
        await manager.destroy(victim.sandbox_id)
        await assert_well(await manager.create())


async def test_a_killed_keeper_ends_its_command_as_killed(managing):
    async with managing() as manager:
        sandbox, other = await manager.create(), await manager.create()
        unharmed = await running(other)
        # The first command is the guest's own child; one beside it has a keeper.
        beside, doomed = await running(sandbox), await running(sandbox)
        init = manager.backend.init_pid(sandbox.sandbox_id)
        program = host_pid(init, doomed.pid)
        (keeper,) = [pid for pid in children_of(init) if program in children_of(pid)]
        os.kill(keeper, signal.SIGKILL)
        async with asyncio.timeout(5):
            result = await doomed.wait()
        assert result["exit_code"] == -signal.SIGKILL
        assert not is_alive(program), "what it kept went with it"
        # The keeper's processes cannot be told from those of the first command. That command is
        # killed, too, or goes on, but it never counts as a success.
        assert beside.poll() in (None, -signal.SIGKILL)
        assert unharmed.poll() is None
        await assert_well(sandbox)


async def test_a_killed_program_is_a_result_and_the_one_beside_it_goes_on(managing):
    async with managing() as manager:
        sandbox = await manager.create()
        init = manager.backend.init_pid(sandbox.sandbox_id)
        first, second = await running(sandbox), await running(sandbox)
        for doomed in (first, second):
            assert doomed.poll() is None
            os.kill(host_pid(init, doomed.pid), signal.SIGKILL)
            async with asyncio.timeout(5):
                assert (await doomed.wait())["exit_code"] == -signal.SIGKILL
        await assert_well(sandbox)


async def test_killed_spares_are_replaced(managing):
    async with managing() as manager:
        sandbox = await manager.create()
        for _ in range(3):
            await assert_well(sandbox)
        for spare in children_of(manager.backend.init_pid(sandbox.sandbox_id)):
            with contextlib.suppress(ProcessLookupError):  # a keeper may just be ending
                os.kill(spare, signal.SIGKILL)
        for _ in range(3):
            await assert_well(sandbox)


@pytest.mark.parametrize("part", ["launcher", "spawner", "zygote"])
async def test_a_killed_helper_ends_its_sandboxes_and_the_next_create_works(managing, part):
    async with managing() as manager:
        sandboxes = [await manager.create() for _ in range(3)]
        commands = [await running(sandbox) for sandbox in sandboxes]
        launcher, spawner = helpers()
        parts = {"launcher": launcher, "spawner": spawner, "zygote": zygote()}
        os.kill(parts[part], signal.SIGKILL)
        for command in commands:
            with pytest.raises(SandboxExecutionError):
                async with asyncio.timeout(5):
                    await command.wait()
        async with asyncio.timeout(8):  # it gives up after ten
            while is_alive(spawner):
                await asyncio.sleep(0.01)
        await assert_well(await manager.create())
        assert len(await manager.backend.list_sandboxes()) == 1, "the dead are not listed"
        for sandbox in sandboxes:
            await manager.destroy(sandbox.sandbox_id)


async def test_a_spawner_killed_during_a_create_is_a_definite_error(managing):
    async with managing() as manager:
        await assert_well(await manager.create())
        _, spawner = helpers()
        os.kill(spawner, signal.SIGSTOP)
        under_way = [asyncio.create_task(manager.create()) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(spawner, signal.SIGKILL)
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(*under_way, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [SandboxExecutionError] * 3
        await assert_well(await manager.create())


async def test_parked_children_that_were_killed_are_replaced(managing):
    """R28: a child that died in stock is never handed out."""
    async with managing(stock=2) as manager:
        await assert_well(await manager.create())
        parent = zygote()
        async with asyncio.timeout(30):
            while len(children_of(parent)) < 3:
                await asyncio.sleep(0.02)
        used = {manager.backend.init_pid(i) for i in manager.active_sandboxes}
        doomed = set(children_of(parent)) - used
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        while any(map(is_alive, doomed)):
            pass  # no sleep: the spawner must not have time to notice
        for _ in range(4):
            await assert_well(await manager.create())
