"""Imported by each Python that has this folder on PYTHONPATH: it watches its event loops.

Only once there is an asyncio, so that a command without a loop starts as it does elsewhere, and one
with a loop imports what it would have imported. With PARACLE_TEST_EVENT_LOOP=uvloop, every program
runs as one whose author has chosen uvloop for it.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def _watch() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import loop_watch

    sys.path.pop()
    loop_watch.watch_uvloop()
    loop_watch.install(Path(os.environ[loop_watch.REPORT_VARIABLE]))
    if os.environ.get("PARACLE_TEST_EVENT_LOOP") == "uvloop":
        _choose_uvloop()


def _choose_uvloop() -> None:
    import asyncio

    class Policy(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            import uvloop

            return uvloop.new_event_loop()

    asyncio.set_event_loop_policy(Policy())


class _WithAsyncio:
    """Finds asyncio as it would be found, and has it watched when it is imported."""

    def find_spec(self, name: str, *_: object) -> "ModuleSpec | None":
        if name != "asyncio":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        usual = spec.loader.exec_module

        def exec_module(module: object) -> None:
            usual(module)  # type: ignore[arg-type]
            _watch()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign,assignment]
        return spec


sys.meta_path.insert(0, _WithAsyncio())  # type: ignore[arg-type]
