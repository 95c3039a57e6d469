"""The state directory: it may be nobody else's, because records decide what gets killed."""

from __future__ import annotations

import os

from ...errors import BackendUnavailableError
from ...owner import is_ours_alone


def require_own_directory(path: str) -> None:
    """Make it if need be. Raises BackendUnavailableError for one of others, or a link."""
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise BackendUnavailableError(
            f"The state directory cannot be used: {error}. Set PARACLE_STATE_DIR to another."
        ) from error
    if not is_ours_alone(found):
        raise BackendUnavailableError(
            f"The state directory {path} is not this user's alone. Remove it, or set "
            "PARACLE_STATE_DIR to another."
        )
