"""A value of the caller's that one of our checks refused."""

from __future__ import annotations


class InvalidValueError(ValueError):
    """What the caller gave cannot be used, and the message says why. Any other ValueError is a
    fault of this package: a service must not tell its clients that it is theirs."""
