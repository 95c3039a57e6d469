"""Run in the test machine, as root: its clock jumps while sandboxes work and wait.

It prints one word for each thing that held.
"""

from __future__ import annotations

import asyncio
import time

from paracle_sandbox.errors import SandboxTimeoutError
from paracle_sandbox.manager import SandboxManager

HOUR = 3600.0


def jump(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)


async def main() -> None:
    async with SandboxManager(4, idle_timeout=1200, cleanup_interval=1) as manager:
        sandbox = await manager.create()
        running = await sandbox.start_command("read line; echo $line", stdin=True, timeout=600)
        jump(HOUR)
        await asyncio.sleep(2)
        listed = [found.sandbox_id for found in await manager.backend.list_sandboxes()]
        assert listed == [sandbox.sandbox_id], listed
        await running.write_stdin(b"alive\n")
        assert (await running.wait())["stdout"] == "alive\n"
        print("forward", flush=True)

        jump(-2 * HOUR)
        try:
            await sandbox.execute("while true; do sleep 1; done", timeout=10)
        except SandboxTimeoutError:
            print("backward", flush=True)

    async with SandboxManager(4, idle_timeout=5, cleanup_interval=1) as manager:
        await manager.create()
        jump(-HOUR)
        async with asyncio.timeout(120):
            while await manager.backend.list_sandboxes():
                await asyncio.sleep(0.2)
        print("idle", flush=True)


asyncio.run(main())
