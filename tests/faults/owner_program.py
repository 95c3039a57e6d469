"""A process that owns sandboxes, for tests that end it. Run as: owner_program.py <what> [count]

It prints one JSON line a time; what it may do is in TASKS.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.errors import ResourceLimitError, SandboxError
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.sandbox.sandbox import Sandbox

LOOP = "while True: pass\n"


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


async def loops(count: int) -> None:
    """Start sandboxes that compute for ever."""
    async with SandboxManager(count, backend=NativeBackend()) as manager:
        sandboxes = [await manager.create() for _ in range(count)]
        commands = [await sandbox.start_code(LOOP, timeout=600) for sandbox in sandboxes]
        while any(command.pid is None for command in commands):
            await asyncio.sleep(0.01)
        say(ready=[sandbox.sandbox_id for sandbox in sandboxes])
        await asyncio.sleep(600)


async def create(_: int) -> None:
    """Create one sandbox, use it and destroy it."""
    backend = NativeBackend()
    try:
        async with SandboxManager(1, backend=backend) as manager:
            say(starting=os.getpid())
            sandbox = await manager.create()
            say(created=sandbox.sandbox_id)
            say(output=(await sandbox.run_code("print('user code ran')"))["stdout"])
    except SandboxError as error:
        say(error=type(error).__name__, step=getattr(error, "step", None), message=str(error))
    finally:
        await backend.close()


async def polite(count: int) -> None:
    """Run executions, and close the manager on SIGTERM, as a service would do it."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    backend = NativeBackend()
    manager = SandboxManager(count, backend=backend)

    async def client(number: int) -> str:
        sandbox = await manager.create()
        started = await sandbox.start_code(LOOP, timeout=600)
        while started.pid is None:
            await asyncio.sleep(0.01)
        running.append(number)
        try:
            await started.wait()
        except SandboxError as error:
            return type(error).__name__
        return "no error"

    running: list[int] = []
    clients = [asyncio.create_task(client(number)) for number in range(count)]
    while len(running) < count:
        await asyncio.sleep(0.01)
    say(ready=count)
    await told.wait()
    await manager.close()
    await backend.close()
    say(outcomes=await asyncio.gather(*clients))


async def copies(_: int) -> None:
    """Make a copy that takes a while, of a file or of a directory, to the path in COPY_TO."""
    destination = os.environ["COPY_TO"]
    async with SandboxManager(1, backend=NativeBackend()) as manager:
        sandbox = await manager.create()
        await sandbox.execute("mkdir tree && truncate -s 900M tree/file")
        say(ready=True)
        await sandbox.copy_from(os.environ["COPY_FROM"], destination)


async def floods(count: int) -> None:
    """On SIGUSR1, run programs that print without end, ten at a time, and report why each was
    stopped."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    backend = NativeBackend()
    async with SandboxManager(10, backend=backend) as manager:
        sandboxes = [await manager.create({"max_output_mb": 1}) for _ in range(10)]
        say(idle=True)
        await told.wait()

        async def flood(sandbox: Sandbox) -> list[str]:
            outcomes = []
            for _ in range(count // len(sandboxes)):
                try:
                    await sandbox.execute("yes", timeout=200)
                    outcomes.append("no error")
                except ResourceLimitError as error:
                    outcomes.append(error.resource_type)
            return outcomes

        said = await asyncio.gather(*(flood(sandbox) for sandbox in sandboxes))
        say(outcomes=[outcome for outcomes in said for outcome in outcomes])
    await backend.close()


async def destroys(count: int) -> None:
    """Create sandboxes with a tree each that takes a while to remove; then destroy all at once."""
    backend = NativeBackend()
    async with SandboxManager(count, backend=backend) as manager:
        sandboxes = [await manager.create() for _ in range(count)]
        many = "mkdir -p t/{a,b,c}/{1,2,3}; for d in t/*/*; do seq 100 | (cd $d; xargs touch); done"
        await asyncio.gather(*(one.execute(f"bash -c '{many}'") for one in sandboxes))
        for one in sandboxes:
            await one.start_code(LOOP, timeout=600)
        say(ready=True)
        for one in sandboxes:
            await backend.destroy(one.sandbox_id)
            say(destroyed=one.sandbox_id)
        say(over=True)
        await asyncio.sleep(600)


TASKS = {
    "destroys": destroys,
    "loops": loops,
    "create": create,
    "polite": polite,
    "copies": copies,
    "floods": floods,
}

if __name__ == "__main__":
    asyncio.run(TASKS[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 1))
