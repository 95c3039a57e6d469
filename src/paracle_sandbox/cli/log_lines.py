"""Print log records to stderr, one line each; none can steer the terminal.

Records quote what came from inside a sandbox, from an engine or from a service. Only the traceback
of an exception has lines of its own.
"""

from __future__ import annotations

import logging

from ..audit.operations import LOGGER as OPERATIONS
from .output import printable

_PLAIN, _WITH_LEVEL = "%(message)s", "%(levelname)s %(message)s"


def log_to_stderr(level: str, *, with_level: bool) -> None:
    """Replace the handlers that there are. Without levels, for a command whose own last line says
    what went wrong, the record of a failed operation would only say it twice."""
    handler = logging.StreamHandler()
    if not with_level:
        handler.addFilter(lambda record: record.name != OPERATIONS.name)
    handler.setFormatter(_Lines(_WITH_LEVEL if with_level else _PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join(super().formatMessage(record).splitlines())

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
