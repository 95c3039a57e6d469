"""An owner of instances, to be killed: has sandboxes, or one kept ready, and says their names. Or
it ends without closing anything, while one that is to be kept ready is being made."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from paracle_sandbox.backends.incus.backend import IncusBackend
from paracle_sandbox.backends.incus.labels import SESSION
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.sandbox.sandbox import Sandbox
from paracle_sandbox.settings import Settings

CONFIG = SandboxConfig(base_image="paracle-test-base")


async def main(what: str, options: dict[str, str]) -> None:
    backend = IncusBackend(Settings(**options))  # type: ignore[arg-type]
    sandbox = Sandbox(backend, f"owned-{os.getpid()}", CONFIG)
    await sandbox.start()
    await sandbox.start_code("while True: pass")
    if what == "forget":
        print(json.dumps([backend.session]), flush=True)
        return
    if what == "hold":
        print(json.dumps([sandbox.sandbox_id]), flush=True)
    else:
        await sandbox.stop()
        await backend.warm_pool.settle()
        everything = await backend.instances.all()
        ours = [one["name"] for one in everything if one["config"].get(SESSION) == backend.session]
        print(json.dumps(ours), flush=True)
    await asyncio.sleep(1000)


asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
