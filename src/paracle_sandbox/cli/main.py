"""The console entry. It imports next to nothing itself, so that Ctrl-C works from the start."""

from __future__ import annotations


def main() -> None:
    """The command ``paracle``."""
    import gc
    import os

    # Most of a short command is imports, and they leave no garbage worth looking for.
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    try:
        from .endings import leave
        from .nouns import run

        leave(run())
    except KeyboardInterrupt:
        os._exit(130)
