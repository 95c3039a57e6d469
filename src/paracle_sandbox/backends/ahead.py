"""What a command line program will need of a backend, started while it still imports.

It imports next to nothing itself, which is why it looks at the environment without the settings.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ..config import SandboxConfig
    from ..settings import Settings

# Whoever sets one of these may want another backend, or another interpreter inside.
_OTHERS = ("SANDBOX_API_URL", "PARACLE_PYTHON")
_MODES = ("auto", "native")


def start_ahead() -> None:
    """Begin to start what ``auto`` is likely to choose. It ends by itself if it is not used."""
    usual = (os.environ.get("SANDBOX_MODE") or "auto") in _MODES
    if sys.platform == "linux" and usual and not any(map(os.environ.get, _OTHERS)):
        from .native.spawner_process import launch_ahead

        launch_ahead()


def prepare_ahead(settings: Settings, first: SandboxConfig) -> bool:
    """Say what it is for: it begins to make the sandbox that will be asked for first. Whether
    there is one, and no doubt that it will be used."""
    if sys.platform != "linux" or settings.mode not in _MODES:
        return False
    from .native.prestart import prepare

    heard = prepare(settings, first)
    from .auto import native_is_taken

    return heard and (settings.mode == "native" or native_is_taken(settings))


def end_ahead() -> None:
    """Nobody asked for it: wait until nothing of it is left."""
    if sys.platform == "linux":
        from .native import spawner_process

        spawner_process.end_ahead()
