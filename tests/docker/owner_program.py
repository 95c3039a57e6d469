"""An owner of sandboxes, to be killed: starts as many as it is told, and says when they run."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from paracle_sandbox.backends.docker.backend import DockerBackend
from paracle_sandbox.backends.docker.gvisor import GvisorBackend
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

BACKENDS = {"docker": DockerBackend, "gvisor": GvisorBackend}


async def main(engine: str, count: int, options: dict[str, Any]) -> None:
    backend = BACKENDS[engine](Settings(**options))
    sandboxes = [Sandbox(backend, f"{options['state_dir'][-6:]}-{n}") for n in range(count)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    for sandbox in sandboxes:
        await sandbox.start_code("while True: pass")
    print(json.dumps([sandbox.sandbox_id for sandbox in sandboxes]), flush=True)
    await asyncio.sleep(1000)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
