"""The console entry. It imports next to nothing itself, so that Ctrl-C works from the start."""

from __future__ import annotations


def _start_ahead(arguments: list[str]) -> None:
    """Whoever runs a program the usual way needs a sandbox: it starts while we import."""
    usual = arguments[:2] == ["sandbox", "execute"] and len(arguments) > 2
    if usual and not any(word.startswith(("--help", "-h", "--backend")) for word in arguments):
        from ..backends.ahead import start_ahead

        start_ahead()


def main() -> None:
    """The command ``paracle``."""
    import gc
    import os
    import signal
    import sys

    # Until a command begins there is nothing to clean up. One that is ignored stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    # Most of a short command is imports, and they leave no garbage worth looking for.
    gc.disable()
    _start_ahead(sys.argv[1:])
    from ..settings import skip_pydantic_plugins
    from .endings import leave
    from .nouns import run

    skip_pydantic_plugins()
    leave(run())
