"""The console entry. It imports next to nothing itself, so that Ctrl-C works from the start."""

from __future__ import annotations


def main() -> None:
    """The command ``paracle``."""
    # Part of the interpreter: ``signal`` itself takes long enough to be interrupted.
    import _signal  # type: ignore[import-not-found]
    import os

    # Until a command begins there is nothing to clean up. One that is ignored stays ignored.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda number, frame: os._exit(128 + number))
    import gc
    import sys

    # Most of a short command is imports, and they leave no garbage worth looking for.
    gc.disable()
    _open_what_is_closed()
    from . import usual

    order = usual.read(sys.argv[1:])
    if order is not None and "backend" not in order:
        from ..backends.native.prestart import start_early

        # Whoever runs a program the usual way needs a sandbox: it starts while we import.
        start_early()
    from .exit_codes import leave

    if order is not None:
        leave(usual.run(order))
    from .app import run

    leave(run())


def _open_what_is_closed() -> None:
    """Whoever closed a stream of ours wants nothing by it. What is opened next would be taken for
    it, and what is meant for stderr would be printed."""
    import os
    import sys

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free: its own.
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115  for good
