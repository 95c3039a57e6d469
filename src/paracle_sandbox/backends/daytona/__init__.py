"""Sandboxes in Daytona's cloud, through the vendor's SDK (the extra ``daytona``).

Names are imported when they are first used, so that only users of Daytona need its SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import DaytonaBackend
    from .desktops import (
        close_workspaces,
        create_sandbox,
        delete_sandbox,
        get_or_start_sandbox,
        start_supervisord_session,
    )
    from .workspaces import DaytonaWorkspaces

__all__ = [
    "DaytonaBackend",
    "DaytonaWorkspaces",
    "close_workspaces",
    "create_sandbox",
    "delete_sandbox",
    "get_or_start_sandbox",
    "start_supervisord_session",
]

# Where a name lives, if not in desktops.
_HOME = {"DaytonaBackend": "backend", "DaytonaWorkspaces": "workspaces"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME.get(name, 'desktops')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
