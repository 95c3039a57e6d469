"""Paths of the service's machine, out of what its users are told."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from ..settings import Settings
from .middleware.caller import ASKER

SHOWN = "(a path of the service's machine)"


class Hiding:
    """Errors name paths so that the operator knows what to mend. In an answer to somebody else a
    path is replaced; the log has it."""

    def __init__(self, settings: Settings) -> None:
        given = (settings.service_dir, settings.state_dir, settings.data_dir)
        self._paths = _pattern([*given, sys.prefix, sys.base_prefix])

    def __call__(self, text: str) -> str:
        """The text as whoever asks now may read it: an admin key as it is."""
        asker = ASKER.get()
        if asker is not None and asker.is_admin:
            return text
        return self._paths.sub(SHOWN, text)


def _pattern(roots: Iterable[str]) -> re.Pattern[str]:
    named = {root.rstrip("/") for root in roots if root.strip("/").count("/")}
    found = "|".join(re.escape(root) for root in sorted(named, key=len, reverse=True))
    if not found:
        return re.compile(r"(?!)")
    inside = r"(?:/(?:[^\s'\",;:)]*[^\s'\",;:).])?)?"
    return re.compile(rf"(?:{found}){inside}(?![\w/-])")
