"""Flags that several commands share, and what they mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import SandboxError
from ..host.backend_names import is_known, known_names
from ..settings import Settings, load_settings
from .exit_codes import UsageFault
from .log_lines import log_to_stderr


def settings_or_fault() -> Settings:
    """The settings; a wrong one is the user's to mend."""
    try:
        settings = load_settings()
    except SandboxError as error:
        raise UsageFault(str(error)) from None
    log_to_stderr(settings.log_level, with_level=settings.log_level in ("debug", "info"))
    return settings


def complete_backend(incomplete: str) -> list[str]:
    """For the shell, after its TAB key."""
    return [name for name in known_names() if name.startswith(incomplete)]


def complete_template(incomplete: str) -> list[str]:
    from ..backends.registry import template_names

    return [name for name in template_names() if name.startswith(incomplete)]


def check_backend(name: str | None) -> None:
    if name is not None and not is_known(name):
        raise UsageFault(f"--backend: there is no {name!r}; known are {', '.join(known_names())}")


def check_terminal(wanted: bool) -> None:
    """Whether the user's terminal can be lent to a program: it is put into another mode for it."""
    if wanted and sys.platform == "win32":
        raise UsageFault("-t and shell need a terminal of Unix, and this is Windows: use WSL 2")


def waived_layers(names: Sequence[str]) -> frozenset[str]:
    """Of ``--allow-degraded``. Raises UsageFault."""
    from ..settings import LAYERS, layers

    try:
        return frozenset(layers(",".join(names)))
    except ValueError as error:
        raise UsageFault(f"--allow-degraded: {error}; known are {', '.join(LAYERS)}") from None
