"""The console entry. It imports next to nothing itself, so that Ctrl-C works from the start."""

from __future__ import annotations


def main() -> None:
    """The command ``paracle``."""
    import gc
    import os
    import signal

    # Until a command begins there is nothing to clean up. One that is ignored stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    # Most of a short command is imports, and they leave no garbage worth looking for.
    gc.disable()
    from ..settings import skip_pydantic_plugins
    from .endings import leave
    from .nouns import run

    skip_pydantic_plugins()
    leave(run())
