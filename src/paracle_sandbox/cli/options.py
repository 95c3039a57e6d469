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


def check_backend(name: str | None) -> None:
    if name is not None and name not in MODES:
        raise UsageFault(f"--backend: there is no {name!r}; known are {', '.join(MODES)}")
