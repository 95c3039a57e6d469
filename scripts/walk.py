"""Count the files that one ``print(1)`` passes through in the process of its owner.

Each way in (library, command line, REST) runs the program twice in a process of its own. The
second run is counted, with ``sys.setprofile``: the files of the package whose functions were
called, and how often a call was in another file than the call before it. The first run makes what
lasts (the spawner). The command line runs once: a user's command has nothing to reuse. Functions
that run while a module is being imported do not count.

    python scripts/walk.py            # a table
    python scripts/walk.py --files    # the table, and the files of each way with their calls
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from types import FrameType

WAYS = ("library", "command line", "REST")
PROGRAM = "print(1)"
KEY = "a-key-for-this-walk"


class Walk:
    """Collects the files of ours that are entered while it is on."""

    def __init__(self) -> None:
        import paracle_sandbox

        self.root = os.path.dirname(os.path.abspath(paracle_sandbox.__file__)) + os.sep
        self.calls: Counter[str] = Counter()
        self.switches = 0
        self._here = ""

    def note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.root):
            return
        if code.co_name == "<module>" or _is_import(frame):
            return
        self.calls[code.co_filename] += 1
        if code.co_filename != self._here:
            self.switches += 1
            self._here = code.co_filename

    def write(self, out: str) -> None:
        files = {path.removeprefix(self.root): count for path, count in self.calls.items()}
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"files": files, "switches": self.switches}, file)


def _is_import(frame: FrameType | None) -> bool:
    """Whether a module is being imported below: class bodies and decorators run then."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


async def _twice(walk: Walk, once: Callable[[], Awaitable[object]]) -> None:
    await once()
    sys.setprofile(walk.note)
    await once()
    sys.setprofile(None)


async def library(walk: Walk) -> None:
    from paracle_sandbox import SandboxExecutor

    async with SandboxExecutor(backend="native") as executor:
        await _twice(walk, lambda: executor.execute_agent(PROGRAM, monitor=False))


async def rest(walk: Walk) -> None:
    import httpx2

    from paracle_sandbox import get_backend, load_settings
    from paracle_sandbox.service.app import make_app
    from paracle_sandbox.service.service import Service

    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings({**os.environ, "SANDBOX_DATA_DIR": folder, "SANDBOX_API_KEY": KEY})
        service = Service(settings, get_backend("native", settings))
        await service.start()
        transport = httpx2.ASGITransport(app=make_app(service))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://service", headers={"X-API-Key": KEY}
        ) as client:

            async def once() -> None:
                answer = await client.post("/sandbox/ann/execute", json={"code": PROGRAM})
                assert answer.json()["output"] == "1\n", answer.text

            await _twice(walk, once)
        await service.close()


def command_line(walk: Walk, out: str) -> None:
    from paracle_sandbox.__main__ import main

    leave = os._exit

    def finish(code: int) -> None:  # a command ends its process at once
        sys.setprofile(None)
        walk.write(out)
        leave(code)

    os._exit = finish  # type: ignore[assignment]
    sys.argv = ["paracle", "sandbox", "execute", "-c", PROGRAM]
    sys.setprofile(walk.note)
    main()


def main() -> None:
    if len(sys.argv) == 3:
        way, out = sys.argv[1:]
        walk = Walk()
        if way == "command line":
            command_line(walk, out)
        asyncio.run((library if way == "library" else rest)(walk))
        walk.write(out)
        return
    print(f"{'way':14}{'files':>6}{'switches':>10}{'calls':>7}")
    for way in WAYS:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            argv = [sys.executable, __file__, way, file.name]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            with open(file.name, encoding="utf-8") as written:
                found = json.load(written)
        calls = sum(found["files"].values())
        print(f"{way:14}{len(found['files']):6}{found['switches']:10}{calls:7}")
        if "--files" in sys.argv:
            for path, count in sorted(found["files"].items(), key=lambda entry: -entry[1]):
                print(f"{count:10}  {path}")


if __name__ == "__main__":
    main()
