"""Flags that several commands share, and what they mean."""

from __future__ import annotations

from ..errors import SandboxError
from ..settings import MODES, Settings, load_settings
from .endings import UsageFault


def settings_or_fault() -> Settings:
    """The settings; a wrong one is the user's to mend."""
    try:
        settings = load_settings()
    except SandboxError as error:
        raise UsageFault(str(error)) from None
    if settings.log_level in ("debug", "info"):
        import logging

        logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(message)s")
    return settings


def complete_backend(incomplete: str) -> list[str]:
    """For the shell, after its TAB key."""
    return [name for name in MODES if name.startswith(incomplete)]


def complete_template(incomplete: str) -> list[str]:
    from ..backends.catalog import template_names

    return [name for name in template_names() if name.startswith(incomplete)]


def check_backend(name: str | None) -> None:
    if name is not None and name not in MODES:
        raise UsageFault(f"--backend: there is no {name!r}; known are {', '.join(MODES)}")
