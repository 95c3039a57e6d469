"""Reads the JSON of a service's answers, and trusts no service.

Values are counted before any is made: four megabytes of empty lists would hold up the event loop
for a quarter of a second.
"""

from __future__ import annotations

import json
from typing import Any

from ...channel.frames import has_more_items

# A list of a thousand sandboxes has fewer.
_MAX_ITEMS = 50_000


def from_json(content: bytes) -> Any:
    """Parse an answer. Raises ValueError for text that is not JSON, is nested too deeply or holds
    too many values."""
    if has_more_items(content, _MAX_ITEMS):
        raise ValueError(f"more than {_MAX_ITEMS} values")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
