"""Start the spawner's process while a command line program still imports.

The program calls ``start_early`` first thing, ``prepare_early`` once it knows what it is asked for,
and ``end_early`` at its end. This module imports next to nothing, which is why it looks at the
environment without the settings.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ...config import SandboxConfig
    from ...settings import Settings

# If one of these is set, another backend or another interpreter may be wanted.
_OTHERS = ("SANDBOX_API_URL", "PARACLE_PYTHON")
_MODES = ("auto", "native")


def start_early() -> None:
    """Start the process that ``auto`` is likely to need. It ends by itself if it is not used."""
    usual = (os.environ.get("SANDBOX_MODE") or "auto") in _MODES
    if sys.platform == "linux" and usual and not any(map(os.environ.get, _OTHERS)):
        from .spawner_process import launch_ahead

        launch_ahead()


def prepare_early(settings: Settings, first: SandboxConfig) -> bool:
    """Have the early process make the sandbox that will be asked for first. Returns whether there
    is such a process, and it is certain that it will be used."""
    if sys.platform != "linux" or settings.mode not in _MODES:
        return False
    heard = _tell_options(settings, first)
    from .obstacles import problem

    return heard and (settings.mode == "native" or not (settings.api_url or problem(settings)))


def end_early() -> None:
    """End what was started early and is not used, and wait until nothing of it is left."""
    if sys.platform == "linux":
        from .spawner_process import end_ahead

        end_ahead()


def _tell_options(settings: Settings, first: SandboxConfig) -> bool:
    """Send the options that the backend will choose for its first sandbox. An error here is met
    again, and reported, by the backend. Returns whether a process heard them."""
    import json

    from ...errors import SandboxError
    from .records import require_own_directory
    from .spawner_process import default_python, tell_ahead
    from .spawner_protocol import spawner_options
    from .template_kinds import find_template, refuse_other_python, template_name

    try:
        require_own_directory(settings.state_dir)
        refuse_other_python(first.base_image, settings)
        template = find_template(template_name(first.base_image), settings)
    except SandboxError:
        return False
    options = json.dumps(spawner_options(settings, template, first)).encode()
    return tell_ahead(settings.python or default_python(), options)
