"""Read what the environment says of the user's shell and terminal: no settings of ours."""

from __future__ import annotations

import os

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping


def terminal_kind() -> str | None:
    """The name under which programs look up what the user's terminal understands."""
    return os.environ.get("TERM")


def allows_colour() -> bool:
    """Whether a terminal may be shown colours."""
    return "NO_COLOR" not in os.environ and terminal_kind() != "dumb"


def login_shell() -> str:
    """The name of the user's shell; empty if it is not known."""
    return os.path.basename(os.environ.get("SHELL", ""))


def completion_request() -> Mapping[str, str] | None:
    """The variables, if the shell has started this process to complete a word."""
    return os.environ if os.environ.get("_PARACLE_COMPLETE") else None
